// Files that go with a message: texts, {name, text}, and pictures, {name, url}, whose URL holds the data.

import { byId, count, icon, iconButton, make } from "./dom.js";

const MAX_BYTES = 2 ** 20;

const MAX_SIDE = 2048;  // pixels of a picture
const SENT_AS_IT_IS = ["image/png", "image/jpeg", "image/webp", "image/gif"];

const isPicture = (file) => file.type.startsWith("image/") && file.type !== "image/svg+xml";

/** A picture as a data: URL.  A large one is scaled down, so that a conversation can be stored and sent. */
async function readPicture(file) {
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error(`${file.name} cannot be shown by this browser.`);
  });
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  let blob = file;
  if (scale < 1 || file.size > MAX_BYTES || !SENT_AS_IT_IS.includes(file.type)) {
    const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
    const canvas = new OffscreenCanvas(width, height);
    const pen = canvas.getContext("2d");
    pen.imageSmoothingQuality = "high";
    pen.fillStyle = "white";  // JPEG has no transparency
    pen.fillRect(0, 0, width, height);
    pen.drawImage(bitmap, 0, 0, width, height);
    blob = await canvas.convertToBlob({ type: "image/jpeg", quality: 0.9 });
  }
  bitmap.close();
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(blob);
  });
}

/** The text of a file; raises an Error that the page can show. */
async function readText(file) {
  if (file.size > MAX_BYTES) throw new Error(`${file.name} has ${count(file.size)} bytes; the limit is ${count(MAX_BYTES)}.`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch { /* not UTF-8 */ }
  throw new Error(`${file.name} is not UTF-8 text.`);
}

/** Parts of a message's content. */
const partsOf = (content) => Array.isArray(content) ? content : [{ type: "text", text: content }];

/** The content of two messages of the user as one. */
export const joined = (first, second) =>
  [first, second].some(Array.isArray) ? [...partsOf(first), ...partsOf(second)] : `${first}\n\n${second}`;

/** The content of a message for the model: a text, or parts if it has pictures, which come first. */
export function contentOf({ files = [], content }) {
  const text = textOf(files.filter((file) => !file.url), content);
  const pictures = files.filter((file) => file.url).map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return pictures.length ? [...pictures, ...(text ? partsOf(text) : [])] : text;
}

/** The text of a message: its files, each in a fence that the file does not hold, then its own. */
function textOf(files, content) {
  const fenced = files.map(({ name, text }) => {
    const longest = Math.max(2, ...Array.from(text.matchAll(/`+/g), ([run]) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...fenced, content].filter(Boolean).join("\n\n");
}

/** A file in a message. */
export const fileView = ({ name, text, url }) =>
  url ? make("img", { class: "picture", src: url, alt: name }) : make("details", { class: "attachment" },
    make("summary", {}, icon("chevron"), `${name} · ${count(text.length)} characters`), make("pre", { tabIndex: 0 }, text));

/** The files of the message that is being written. */
export class Attachments {
  /**
   * problem(owner, text): shows a notice; "" hides the owner's.  sees(): whether the model takes pictures.
   * changed(): called after files were added or removed.
   */
  constructor(problem, sees, changed) {
    Object.assign(this, { problem, sees, changed });
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
        this.files.push(await this.read(file));
      } catch (error) {
        refused.push(error.message);
      }
    }
    this.numReading -= 1;
    this.problem("files", refused.join(" "));
    this.draw();
  }

  async read(file) {
    const { name } = file;
    if (!isPicture(file)) return { name, text: await readText(file) };
    if (!this.sees()) throw new Error(`${name} is a picture, and this model reads text only.`);
    return { name, url: await readPicture(file) };
  }

  /** Say which files the model takes. */
  drawField() {
    const field = byId("attach");
    field.ariaLabel = field.parentElement.title = this.sees() ? "Attach pictures or text files" : "Attach text files";
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
    this.changed();
    byId("attached").replaceChildren(...this.files.map((file) =>
      make("li", {}, file.url ? make("img", { src: file.url, alt: "" }) : null, make("span", { title: file.name }, file.name),
        iconButton("close", `Remove ${file.name}`, () => {
          this.files = this.files.filter((other) => other !== file);
          this.draw();
          byId("prompt").focus();
        }))));
  }
}
