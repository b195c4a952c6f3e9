// Text files that go with a message: {name, text}.

import { byId, count, iconButton, make } from "./dom.js";

const MAX_BYTES = 2 ** 20;

/** The text of a file; raises an Error that the page can show. */
async function read(file) {
  if (file.size > MAX_BYTES) throw new Error(`${file.name} has ${count(file.size)} bytes; the limit is ${count(MAX_BYTES)}.`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch { /* not UTF-8 */ }
  throw new Error(`${file.name} is not UTF-8 text.`);
}

/** The text of a message for the model: its files, each in a fence that the file does not hold, then its text. */
export function contentOf({ files = [], content }) {
  const fenced = files.map(({ name, text }) => {
    const longest = Math.max(2, ...Array.from(text.matchAll(/`+/g), ([run]) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...fenced, content].filter(Boolean).join("\n\n");
}

/** A file in a message. */
export const fileView = ({ name, text }) =>
  make("details", { class: "attachment" },
    make("summary", {}, `${name} · ${count(text.length)} characters`), make("pre", { tabIndex: 0 }, text));

/** The files of the message that is being written. */
export class Attachments {
  /** problem(owner, text): shows a notice; "" hides the owner's. */
  constructor(problem) {
    this.problem = problem;
    this.files = [];
    this.numReading = 0;  // calls of `add`; the message waits for them
    const field = byId("attach");
    field.addEventListener("change", async () => {
      await this.add(field.files);
      field.value = "";
      byId("prompt").focus();
    });
    const area = byId("chat");
    const withFiles = (handle) => (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;  // text may be dropped anywhere
      event.preventDefault();
      handle(event.dataTransfer.files);
    };
    area.addEventListener("dragover", withFiles(() => {}));
    area.addEventListener("drop", withFiles((files) => this.add(files)));
    byId("prompt").addEventListener("paste", ({ clipboardData }) => {
      // Some programs put a picture beside their text.
      if (!clipboardData.types.includes("text/plain")) this.add(clipboardData.files);
    });
  }

  async add(files) {
    if (!files.length) return;
    const refused = [];
    this.numReading += 1;
    this.draw();
    for (const file of Array.from(files)) {
      try {
        this.files.push({ name: file.name, text: await read(file) });
      } catch (error) {
        refused.push(error.message);
      }
    }
    this.numReading -= 1;
    this.problem("files", refused.join(" "));
    this.draw();
  }

  /** Hand the files over. */
  take() {
    const taken = this.files;
    this.files = [];
    this.problem("files", "");
    this.draw();
    return taken;
  }

  draw() {
    byId("send").disabled = this.numReading > 0;
    byId("attached").replaceChildren(...this.files.map((file) =>
      make("li", {}, make("span", {}, file.name), iconButton("close", `Remove ${file.name}`, () => {
        this.files = this.files.filter((other) => other !== file);
        this.draw();
        byId("prompt").focus();
      }))));
  }
}
