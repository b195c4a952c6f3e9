// Conversations as files of JSON.

import { make } from "./dom.js";
import { growing, newId, show, stop } from "./tree.js";

/** Hand a value to the user, as a file of JSON that is named after `title`. */
export function download(title, value) {
  const name = `${title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation"}.json`;
  const blob = new Blob([JSON.stringify(value, null, 2)], { type: "application/json" });
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

const isText = (value) => typeof value === "string";
const isPicture = (url) => isText(url) && url.startsWith("data:image/");
const isFile = (value) => isText(value?.name) && (isText(value.text) || isPicture(value.url));
const isUsage = (value) => Number.isFinite(value.prompt_tokens + value.completion_tokens);
const missingOr = (isGood) => (value) => value == null || isGood(value);

const GOOD_MESSAGE = {  // whether a message's field is what it must be
  role: (role) => ["user", "assistant"].includes(role),
  id: isText,
  content: isText,
  files: missingOr((files) => Array.isArray(files) && files.every(isFile)),
  reasoning: missingOr(isText),
  error: missingOr(isText),
  usage: missingOr(isUsage),
  startedAt: missingOr(Number.isFinite),
  firstAt: missingOr(Number.isFinite),
  endedAt: missingOr(Number.isFinite),
};
const isMessage = (m) => Object.entries(GOOD_MESSAGE).every(([name, isGood]) => isGood(m?.[name]));

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

/** The conversations of a file that was exported; raises an Error that the page can show. */
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
  for (const c of found) growing(c).forEach((m) => stop(c, m.id));
  return found;
}
