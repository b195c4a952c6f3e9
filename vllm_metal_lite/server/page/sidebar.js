// The list of conversations.

import { ask, confirmed } from "./dialogs.js";
import { byId, iconButton, make } from "./dom.js";
import { newId, settle, show } from "./tree.js";

/** Hand a value to the user, as a file of JSON. */
export function download(name, value) {
  const blob = new Blob([JSON.stringify(value, null, 2)], { type: "application/json" });
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

const fileName = (title) => `${title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation"}.json`;

const isText = (value) => typeof value === "string";

const isMessage = (m) =>
  ["user", "assistant"].includes(m?.role) && isText(m.id) && isText(m.content) &&
  (m.files === undefined || Array.isArray(m.files) && m.files.every((f) => isText(f?.name) && isText(f.text)));

/** Whether the messages are a tree: each has a unique id and an earlier parent; the user's may have none. */
function isTree(messages) {
  const known = new Set();
  const fits = (m) => m.parent == null ? m.role === "user" : known.has(m.parent);
  return messages.every((m) => fits(m) && !known.has(m.id) && known.add(m.id));
}

const GOOD = {  // whether a conversation's field is what it must be
  title: isText,
  system: isText,
  updated: Number.isFinite,
  model: (model) => model === null || isText(model),
  sampling: (sampling) => sampling?.constructor === Object && Array.isArray(sampling.stop ?? []),
  messages: (messages) => Array.isArray(messages) && messages.every(isMessage) && isTree(messages),
  leaf: (leaf, { messages }) => leaf === null || messages.some((m) => m.id === leaf),
};

/** The conversations of a file that was exported; raises an Error in words. */
export async function readExport(file) {
  let value;
  try {
    value = JSON.parse(await file.text());
  } catch {
    throw new Error(`${file.name} is not JSON.`);
  }
  // A new id: the file never replaces what is here.
  const defaults = { sampling: {}, system: "", model: null, leaf: null, updated: Date.now() };
  const found = [value].flat().map((c) => ({ ...defaults, ...c, id: newId() }));
  const odd = Object.keys(GOOD).find((name) => !found.every((c) => GOOD[name](c[name], c)));
  if (odd) throw new Error(`${file.name} is not an export of this page: its “${odd}” is not valid.`);
  if (!found.length) throw new Error(`${file.name} contains no conversations.`);
  for (const c of found.filter((c) => c.leaf === null)) show(c, c.messages.findLast((m) => m.parent == null));
  return found.map((c) => settle(c));
}

/** Whether a title or a message holds each of these words. */
function holds(conversation, words) {
  const text = [conversation.title, ...conversation.messages.map((m) => m.content)].join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}

/** Draw the list, those that are searched for.  actions: open(conversation), removed(conversation), renamed(conversation). */
export function drawList(conversations, current, running, actions) {
  const sought = byId("search").value.trim();
  const words = sought.toLowerCase().split(/\s+/);
  const found = sought ? conversations.filter((c) => holds(c, words)) : conversations;
  byId("no-match").textContent = found.length || !sought ? "" : `No conversation contains “${sought}”.`;
  const items = found.map((c) => {
    const open = make(
      "button",
      { type: "button", class: "title", title: c.title, onclick: () => actions.open(c) },
      make("span", { dir: "auto" }, c.title),
    );
    if (c.id === current?.id) open.setAttribute("aria-current", "page");
    if (running.has(c.id)) open.append(make("span", { class: "pulse", role: "img", "aria-label": "being answered" }));
    const rename = async () => {
      const name = await ask("Conversation name", c.title);
      if (!name) return;
      c.title = name;
      actions.renamed(c);
    };
    const remove = async () => {
      if (await confirmed(`Delete “${c.title}”? This cannot be undone.`, "Delete")) actions.removed(c);
    };
    return make(
      "li", {}, open,
      make("span", { class: "tools" },
        iconButton("edit", `Rename ${c.title}`, rename),
        iconButton("down", `Export ${c.title} as JSON`, () => download(fileName(c.title), c)),
        iconButton("delete", `Delete ${c.title}`, remove)),
    );
  });
  byId("conversations").replaceChildren(...items);
}
