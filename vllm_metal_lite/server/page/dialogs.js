// Dialogs: settings of a conversation, a name, a question, the API key.

import { byId } from "./dom.js";
import { NUMBERS, parsed } from "./sampling.js";

/** Show a dialog; resolves when it closes, to the value of the button. */
function shown(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true });
  });
}

/** Ask for a line of text; null: cancelled. */
export async function ask(label, value) {
  const field = byId("ask-value");
  byId("ask-label").textContent = label;
  field.value = value;
  queueMicrotask(() => field.select());
  return (await shown(byId("ask"))) === "ok" ? field.value.trim() || null : null;
}

/** Ask yes or no. */
export async function confirmed(question, yes) {
  byId("confirm-question").textContent = question;
  byId("confirm-yes").textContent = yes;
  return (await shown(byId("confirm"))) === "ok";
}

/** Ask for the API key; null: cancelled.  problem: why the last one was refused. */
export async function askKey(problem) {
  const field = byId("key-value");
  byId("key-problem").textContent = problem;
  field.value = "";
  return (await shown(byId("key"))) === "ok" ? field.value.trim() || null : null;
}

/**
 * Edit the system prompt and the sampling of a conversation in place; true: changed.
 * model: what /v1/models says of its model, if it is known.
 */
export async function editSettings(conversation, model) {
  byId("set-system").value = conversation.system;
  const { sampling } = conversation;
  const field = (name) => byId(`set-${name}`);
  for (const name of [...NUMBERS, "thinking", "schema"]) field(name).value = sampling[name] ?? "";
  field("stop").value = (sampling.stop ?? []).join("\n");
  field("schema").oninput = () => checkSchema(field("schema"));
  checkSchema(field("schema"));
  byId("thinking").hidden = model?.thinking === false && sampling.thinking === undefined;
  if ((await shown(byId("settings"))) !== "ok") return false;
  conversation.system = field("system").value;
  const read = {
    ...Object.fromEntries(NUMBERS.map((name) => [name, field(name).value && Number(field(name).value)])),
    thinking: field("thinking").value && field("thinking").value === "true",
    schema: field("schema").value.trim(),
    stop: field("stop").value.split("\n").filter(Boolean),
  };
  conversation.sampling = Object.fromEntries(Object.entries(read).filter(([, value]) => value !== "" && value.length !== 0));
  return true;
}

/** A schema that is not a JSON object cannot be saved. */
function checkSchema(field) {
  const good = !field.value.trim() || parsed(field.value);
  field.setCustomValidity(good ? "" : "This is not a JSON object.");
}

/** Buttons with data-close close their dialog without a value, whatever its fields hold. */
export function prepare() {
  for (const button of document.querySelectorAll("dialog [data-close]")) {
    button.addEventListener("click", () => button.closest("dialog").close());
  }
}
