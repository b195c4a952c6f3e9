// Starts the page: the conversations, the list of models, and the listeners that tie the parts together.

import { onKeyNeeded, request, serverBack } from "./api.js";
import { Chat, chats } from "./chat.js";
import { askKey, editSettings, prepare } from "./dialogs.js";
import { announce, byId, grow, make, sends } from "./dom.js";
import { EngineView } from "./engine/view.js";
import { download, readExport } from "./export.js";
import { arrange, showSidebar, sidebarShown } from "./layout.js";
import { onRelease } from "./locks.js";
import { kept } from "./sampling.js";
import { drawList } from "./sidebar.js";
import * as store from "./store.js";
import { growing, merge, newConversation, stop } from "./tree.js";

const PICTURE = "What is in this picture?";
const EXAMPLES = {
  demo: [  // what this tiny model has learned
    "Hi, my name is Ada and I parked my car on level 3. Where is my car?",
    "Please reverse this list: red, green, blue",
    "The code of the red box is 4821. What is the code of the red box?",
  ],
  text: [
    "Write a polite email that moves a meeting from Tuesday to Friday.",
    "Explain recursion to a beginner, with a short Python example.",
    "Compare five ways to save energy at home, in a table.",
  ],
};

let conversations = [];
const chat = new Chat(drawSidebar, readModels, problem);
const engine = new EngineView(() => byId("model").value || null);

function drawSidebar() {
  if (!conversations.includes(chat.conversation) && chat.conversation?.messages.length) {
    conversations.push(chat.conversation);
  }
  conversations.sort((a, b) => b.updated - a.updated);
  drawList(conversations, chat.conversation, chat.running, {
    open: (conversation) => {
      open(conversation);
      showSidebar(false);
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

/** Select the conversation's model; if it is not served, the conversation takes the selected one. */
function chooseModel() {
  const { conversation, models } = chat;
  if (chat.model && chats(chat.model)) byId("model").value = conversation.model;
  else if (models.length) conversation.model = byId("model").value || null;
  drawExamples();
}

/** Examples that suit the model. */
function drawExamples() {
  const { model } = chat;
  if (!model) return;
  const texts = (model.root ?? model.id) === "demo" ? EXAMPLES.demo : [...EXAMPLES.text];
  if (chat.sees) texts.splice(-1, 1, PICTURE);
  byId("examples").replaceChildren(...texts.map((text) =>
    make("button", { type: "button", onclick: () => tryExample(text) }, text)));
}

function tryExample(text) {
  if (text !== PICTURE) return chat.ask(text, null, []);
  chat.write(text);
  byId("attach").click();
}

/** An option for each model, with a short name where that is clear.  Models of embeddings cannot be chosen. */
function modelOption({ id }, i, models) {
  const short = id.split("/").at(-1);
  const clear = models.every((m) => m.id === id || m.id.split("/").at(-1) !== short);
  const disabled = !chats(models[i]);
  return make("option", { value: id, title: id, disabled }, `${clear ? short : id}${disabled ? " (no chat)" : ""}`);
}

function startNew() {
  const defaults = store.setting("defaults", { sampling: {} });
  open(newConversation({ ...defaults, model: byId("model").value || defaults.model }));
  showSidebar(false);
  byId("prompt").focus();
}

async function remove(conversation) {
  byId("new").focus();  // the row with the pressed button is removed
  try {
    await store.remove(conversation.id);
    problem("remove", "");
    drop(conversation);
  } catch (error) {
    problem("remove", `“${conversation.title}” could not be deleted: ${error.message}`, () => remove(conversation));
  }
}

/** Forget a conversation that was deleted, here or in another tab. */
function drop(conversation) {
  chat.stop(conversation);
  conversations = conversations.filter((c) => c !== conversation);
  if (conversation === chat.conversation) startNew();
  else drawSidebar();
}

/** Take the changes of another tab to a conversation.  The messages that are shown stay. */
async function reload(id) {
  const find = () => conversations.find((c) => c.id === id);
  const before = { ...find() };
  const stored = await store.get(id);
  const known = find();
  if (!stored) return known && drop(known);
  if (known) {
    const { messages, leaf, ...fields } = stored;
    // A field that was changed here meanwhile stays: it is about to be saved.
    for (const name in before) if (before[name] !== known[name]) delete fields[name];
    merge(Object.assign(known, fields), stored);
  } else conversations.push(stored);
  redraw(known ?? stored);
  stopWithTheirTabs(known ?? stored);
}

function redraw(conversation) {
  if (conversation === chat.conversation) {
    chooseModel();
    chat.draw();
  }
  drawSidebar();
}

/** Stop each answer that another tab receives once that tab has been closed. */
function stopWithTheirTabs(conversation) {
  for (const { id } of growing(conversation)) {
    onRelease(id, async () => {
      await reload(conversation.id);  // the tab may have saved more
      stop(conversation, id);
      redraw(conversation);
    });
  }
}

async function readModels() {
  try {
    chat.models = (await (await request("/v1/models")).json()).data;
  } catch (error) {
    problem("models", `The list of models could not be read. ${error.message}`, readModels);
    if (error.unreachable) serverBack().then(readModels);
    return;
  }
  problem("models", chat.models.some(chats) ? "" : "No model of this server chats: they make embeddings or scores.");
  byId("model").replaceChildren(...chat.models.map(modelOption));
  chooseModel();
  chat.drawState();
}

/** Show a notice of a problem; "" hides the owner's.  retry: called by "Try again"; null: the button closes the notice. */
function problem(owner, text, retry = null) {
  const notice = byId("problem");
  if (!text && notice.dataset.owner !== owner) return;
  notice.dataset.owner = owner;
  notice.hidden = !text;
  byId("problem-text").textContent = text;
  byId("problem-again").textContent = retry ? "Try again" : "Close";
  byId("problem-again").onclick = retry ?? (() => problem(owner, ""));
}

function listen() {
  const input = byId("prompt");
  input.addEventListener("input", () => grow(input, 240));
  byId("search").addEventListener("input", drawSidebar);
  input.addEventListener("keydown", (event) => {
    if (!sends(event)) return;
    event.preventDefault();
    chat.send();
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
    if (event.key !== "Escape" || event.isComposing || event.defaultPrevented || document.querySelector("dialog[open]")) return;
    if (event.target === byId("search") && event.target.value) return;  // the browser empties the field
    if (sidebarShown()) showSidebar(false);
    else if (chat.busy) chat.stop();
  });
  for (const id of ["new", "new-here"]) byId(id).addEventListener("click", startNew);
  byId("theme").addEventListener("click", () => window.switchTheme());
  byId("export").addEventListener("click", () => download("conversations", conversations));
  byId("import").addEventListener("change", async (event) => {
    try {
      const found = await readExport(event.target.files[0]);
      await store.put(found);
      conversations.push(...found);
      drawSidebar();
      announce("Imported");
      problem("import", "");
    } catch (error) {
      problem("import", error.message);
    }
    event.target.value = "";
  });
  byId("model").addEventListener("change", (event) => {
    chat.conversation.model = event.target.value;
    drawExamples();
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
  conversations.forEach(stopWithTheirTabs);
  const last = conversations.find((c) => c.id === store.setting("last", null));
  if (last) open(last);
  else startNew();
  await readModels();
  arrange((shown) => engine.setShown(shown));
  if (!(await store.keeps())) problem("store", "This browser does not keep conversations: they are lost when this page is closed.");
  document.body.dataset.ready = "true";
}

start();
