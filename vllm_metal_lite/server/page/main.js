// Puts the parts of the page together.

import { onKeyNeeded, request, serverBack } from "./api.js";
import { Chat } from "./chat.js";
import { askKey, editSettings, prepare } from "./dialogs.js";
import { announce, byId, grow, make } from "./dom.js";
import { EngineView } from "./engine/view.js";
import { kept } from "./sampling.js";
import { download, drawList, readExport } from "./sidebar.js";
import * as store from "./store.js";
import { merge, newConversation } from "./tree.js";

const EXAMPLES = {
  demo: [
    "Hi, my name is Ada and I parked my car on level 3. Where is my car?",
    "Please reverse this list: red, green, blue",
    "The code of the red box is 4821. What is the code of the red box?",
  ],
  other: [
    "Explain how a paged KV cache works, in three sentences.",
    "Write a Python function that merges two sorted lists.",
    "Give me a table of five sorting algorithms and their complexity.",
  ],
};

let conversations = [];
const chat = new Chat(drawSidebar, readModels, problem);
const engine = new EngineView(() => byId("model").value || null);

function closeSidebar() {
  document.body.classList.remove("show-sidebar");
}

function drawSidebar() {
  if (!conversations.includes(chat.conversation) && chat.conversation?.messages.length) {
    conversations.push(chat.conversation);
  }
  conversations.sort((a, b) => b.updated - a.updated);
  drawList(conversations, chat.conversation, chat.running, {
    open: (conversation) => {
      open(conversation);
      closeSidebar();
    },
    renamed: (conversation) => {
      chat.save(conversation, "title");
      chat.drawState();
    },
    removed: remove,
  });
}

function open(conversation) {
  store.keepSetting("last", conversation.id);
  chat.open(conversation);
  chooseModel();
}

/** Choose the conversation's model in the list, or the list's first if the conversation's is not there. */
function chooseModel() {
  const { conversation, models } = chat;
  if (models.some((m) => m.id === conversation.model)) byId("model").value = conversation.model;
  else if (models.length) conversation.model = byId("model").value;
}

function startNew() {
  const defaults = store.setting("defaults", { sampling: {} });
  open(newConversation({ ...defaults, model: byId("model").value || defaults.model }));
  closeSidebar();
  byId("prompt").focus();
}

async function remove(conversation) {
  drop(conversation);
  await store.remove(conversation.id);
}

/** Forget a conversation that was deleted, here or in another tab. */
function drop(conversation) {
  chat.stop(conversation);
  conversations = conversations.filter((c) => c !== conversation);
  if (conversation === chat.conversation) startNew();
  else drawSidebar();
}

/** Take what another tab has changed in a conversation.  The messages that are shown stay. */
async function reload(id) {
  const stored = await store.get(id);
  const known = conversations.find((c) => c.id === id);
  if (known && !stored) return drop(known);
  if (known) {
    const { messages, leaf, ...fields } = stored;
    merge(Object.assign(known, fields), stored);
  } else if (stored) conversations.push(stored);
  if (known === chat.conversation) {
    chooseModel();
    chat.draw();
  }
  drawSidebar();
}

async function readModels() {
  const choice = byId("model");
  try {
    chat.models = (await (await request("/v1/models")).json()).data;
  } catch (error) {
    problem("models", `The list of models could not be read. ${error.message}`, readModels);
    if (error.unreachable) serverBack().then(readModels);
    return;
  }
  problem("models", "");
  choice.replaceChildren(...chat.models.map((m) => make("option", { value: m.id }, m.id)));
  chooseModel();
  const demo = chat.models.length === 1 && (chat.models[0].root ?? chat.models[0].id) === "demo";
  const texts = demo ? EXAMPLES.demo : EXAMPLES.other;
  byId("examples").replaceChildren(...texts.map((text) =>
    make("button", { type: "button", onclick: () => chat.ask(text, null, []) }, text)));
}

/** Show a notice of a problem; "" hides the owner's.  retry: what may help; null: the notice is closed. */
function problem(owner, text, retry = null) {
  const notice = byId("problem");
  if (!text && notice.dataset.owner !== owner) return;
  notice.dataset.owner = owner;
  notice.hidden = !text;
  byId("problem-text").textContent = text;
  byId("problem-again").textContent = retry ? "Try again" : "Close";
  byId("problem-again").onclick = retry ?? (() => problem(owner, ""));
}

const narrow = matchMedia("(max-width: 1100px)");  // as in the style sheets
const wide = matchMedia("(min-width: 1440px)");

function showEngine(shown) {
  document.body.classList.toggle("show-engine", shown);
  document.body.classList.toggle("drawer", narrow.matches || (shown && !wide.matches));
  byId("engine-toggle").setAttribute("aria-expanded", String(shown));
  if (!narrow.matches) store.keepSetting("engine", shown);
  byId("chat").inert = shown && narrow.matches;  // the view covers the chat
  engine.setShown(shown);
}

/** /#engine shows the engine alone. */
function followHash() {
  const alone = location.hash === "#engine";
  document.body.classList.toggle("engine-alone", alone);
  byId("engine-alone").setAttribute("href", alone ? "#" : "#engine");
  const label = alone ? "Show the chat too" : "Show the engine alone";
  byId("engine-alone").setAttribute("aria-label", label);
  byId("engine-alone").title = label;
  showEngine(alone || (!narrow.matches && store.setting("engine", wide.matches)));
}

function listen() {
  const input = byId("prompt");
  input.addEventListener("input", () => grow(input, 240));
  byId("search").addEventListener("input", drawSidebar);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      chat.send();
    }
  });
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    chat.send();
  });
  byId("stop").addEventListener("click", () => {
    chat.stop();
    input.focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
    if (chat.busy) chat.stop();
    else closeSidebar();
  });
  byId("new").addEventListener("click", startNew);
  byId("theme").addEventListener("click", () => window.switchTheme());
  byId("export").addEventListener("click", () => download("conversations.json", conversations));
  byId("import").addEventListener("change", async (event) => {
    try {
      const found = await readExport(event.target.files[0]);
      await store.put(found);
      conversations.push(...found);
      drawSidebar();
      announce("Imported");
    } catch (error) {
      problem("import", error.message);
    }
    event.target.value = "";
  });
  byId("sidebar-toggle").addEventListener("click", () => {
    if (document.body.classList.toggle("show-sidebar")) byId("new").focus();
  });
  byId("backdrop").addEventListener("click", closeSidebar);
  byId("engine-toggle").addEventListener("click", () =>
    showEngine(!document.body.classList.contains("show-engine")));
  byId("engine-close").addEventListener("click", () => {
    showEngine(false);
    if (location.hash === "#engine") location.hash = "";
    byId("engine-toggle").focus();
  });
  addEventListener("hashchange", followHash);
  for (const width of [narrow, wide]) width.addEventListener("change", followHash);
  byId("model").addEventListener("change", (event) => {
    chat.conversation.model = event.target.value;
    keepChoices(chat.conversation);
  });
  byId("settings-open").addEventListener("click", changeSettings);
  byId("effect").addEventListener("click", changeSettings);
}

async function changeSettings() {
  const { conversation } = chat;
  if (await editSettings(conversation, chat.model)) keepChoices(conversation);
}

/** Save a conversation's model and settings.  New conversations start with them. */
function keepChoices(conversation) {
  const { model, sampling } = conversation;
  store.keepSetting("defaults", { model, sampling: kept(sampling) });
  if (conversation.messages.length) chat.save(conversation, "model", "system", "sampling");
  chat.drawState();
}

async function start() {
  prepare();
  onKeyNeeded(askKey);
  listen();
  conversations = await store.all().catch((error) => {
    problem("store", `The conversations could not be read: ${error.message}`);
    return [];
  });
  store.onChange(reload);
  const last = conversations.find((c) => c.id === store.setting("last", null));
  if (last) open(last);
  else startNew();
  await readModels();
  chat.open(chat.conversation);
  followHash();
  if (!(await store.keeps())) problem("store", "This browser does not keep conversations: they are lost when this page is closed.");
  document.body.dataset.ready = "true";
}

start();
