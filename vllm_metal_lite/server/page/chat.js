// The chat: shows a conversation, asks, stops, edits.

import { answer, bodyOf } from "./answer.js";
import { serverBack } from "./api.js";
import { Attachments } from "./attachments.js";
import { announce, byId, count, Drawing, place } from "./dom.js";
import { hold } from "./locks.js";
import { MessageView } from "./message.js";
import { inEffect } from "./sampling.js";
import * as store from "./store.js";
import * as tree from "./tree.js";

const NEAR = 48;  // pixels from the end at which the view still scrolls along
const SAVE_MS = 1000;  // while an answer grows

/** Whether a model of /v1/models writes text; the others make embeddings or scores. */
export const chats = (model) => model.capabilities?.includes("completion") ?? true;

export class Chat {
  /**
   * changed: called after a conversation was saved.  readModels: reads `models`, those of /v1/models,
   * again.  problem(owner, text, retry): shows a notice; "" hides the owner's.
   */
  constructor(changed, readModels, problem) {
    this.changed = changed;
    this.readModels = readModels;
    this.problem = problem;
    this.attachments = new Attachments(problem, () => this.sees, () => this.drawSend());  // of the next message
    this.conversation = null;
    this.running = new Map();  // of each conversation that is answered: its AbortController
    this.models = [];
    this.list = byId("messages");
    this.scroller = byId("scroller");
    this.input = byId("prompt");
    this.views = [];
    this.sticks = true;
    this.top = 0;
    this.actions = {
      edit: (message, text) => this.editAndAsk(message, text),
      regenerate: (message) => this.regenerate(message),
      show: (message) => {
        tree.show(this.conversation, message);
        this.save(this.conversation, "leaf");
        this.draw();
        // The buttons are new ones.
        this.viewOf(message).element.querySelector(".actions button:enabled")?.focus();
      },
    };
    this.scroller.addEventListener("scroll", () => this.scrolled());
    this.input.addEventListener("input", () => this.drawSend());
    // The text grows, the window changes its size: stay at the end.
    new ResizeObserver(() => this.follow()).observe(this.list);
    byId("to-end").addEventListener("click", () => {
      this.sticks = true;
      this.follow();
      this.input.focus();
    });
  }

  /** The conversation's model, as /v1/models lists it. */
  get model() {
    return this.models.find((m) => m.id === this.conversation.model);
  }

  /** Whether the model takes pictures. */
  get sees() {
    return Boolean(this.model?.input_modalities?.includes("image"));
  }

  get busy() {
    return this.running.has(this.conversation?.id);
  }

  /** Show a conversation. */
  open(conversation) {
    this.conversation = conversation;
    this.sticks = true;
    this.draw();
    this.follow();
  }

  draw() {
    const { conversation } = this;
    const drawn = new Map(this.views.map((view) => [view.message, view]));
    this.views = tree.path(conversation).map((m) => {
      const view = drawn.get(m);
      const same = view && view.numVersions === tree.versions(conversation, m).length;
      return same ? view : new MessageView(conversation, m, this.actions);
    });
    place(this.list, this.views.map((view) => view.element));
    byId("welcome").hidden = this.views.length > 0;
    this.drawState();
  }

  /** Send is enabled while there is something to send, and a model for it. */
  drawSend() {
    const { files, numReading } = this.attachments;
    const chatting = !this.models.length || (this.model && chats(this.model));
    const ready = chatting && !numReading && (this.input.value.trim() || files.length);
    byId("send").disabled = !ready;
    byId("send").setAttribute("aria-busy", String(numReading > 0));
  }

  drawState() {
    this.attachments.drawField();
    this.drawSend();
    byId("send").hidden = this.busy;
    byId("stop").hidden = !this.busy;
    byId("context").textContent = this.contextUse();
    const effect = inEffect(this.conversation);
    byId("effect").hidden = !effect;
    if (effect) byId("effect").textContent = effect;
    byId("heading").textContent = this.conversation.title;
    document.title = this.conversation.messages.length ? `${this.conversation.title} - vllm-metal-lite` : "vllm-metal-lite";
    this.changed();
  }

  contextUse() {
    const last = tree.path(this.conversation).findLast((m) => m.usage);
    const limit = this.model?.max_model_len;
    if (!last || !limit) return "";
    const used = last.usage.prompt_tokens + last.usage.completion_tokens;
    return `${count(used)} of ${count(limit)} tokens of context`;
  }

  /** Send the text of the box, with the attached files. */
  send() {
    if (this.busy || byId("send").disabled) return;
    const text = this.input.value.trim();
    this.write("");
    this.ask(text, this.conversation.leaf, this.attachments.take());
  }

  /** Replace the text of the box. */
  write(text) {
    this.input.value = text;
    this.input.dispatchEvent(new Event("input"));
  }

  ask(text, parent, files) {
    const { conversation } = this;
    const question = tree.append(conversation, parent, { role: "user", content: text, files });
    if (conversation.title === tree.UNTITLED) conversation.title = title(text || files[0].name);
    this.answer(question);
  }

  editAndAsk(message, text) {
    if (this.busy) this.stop();
    this.ask(text, message.parent, message.files);
  }

  regenerate(message) {
    if (this.busy) return;
    this.answer(tree.find(this.conversation, message.parent));
  }

  stop(conversation = this.conversation) {
    this.running.get(conversation.id)?.abort();
  }

  /** Ask for an answer to a message of the user, and show it as it grows. */
  async answer(question) {
    const { conversation } = this;
    const stopper = new AbortController();
    this.running.set(conversation.id, stopper);
    conversation.leaf = question.id;
    conversation.model ??= this.models[0]?.id ?? null;
    const body = bodyOf(conversation, tree.path(conversation));
    const message = tree.append(conversation, question.id, {
      role: "assistant", content: "", finish: null, model: conversation.model,
    });
    this.sticks = true;
    this.draw();
    this.follow();
    if (matchMedia("(hover: hover)").matches) this.input.focus();  // no keyboard on a phone
    this.save(conversation, "title", "leaf", "model", "updated");
    announce("Waiting for the answer");
    const drawing = new Drawing(() => this.viewOf(message)?.update(conversation, this.actions));
    let savedAt = performance.now();
    const saved = answer(message, body, stopper.signal, () => {
      drawing.request();
      if (performance.now() - savedAt > SAVE_MS) {
        savedAt = performance.now();
        store.put([conversation], [], true).catch(() => {});  // the last save reports it
      }
    }).then(() => {
      drawing.cancel();
      // An edit may have started another answer by now.
      if (this.running.get(conversation.id) === stopper) this.running.delete(conversation.id);
      conversation.updated = Date.now();
      return this.save(conversation, "updated");
    });
    hold(message.id, saved);
    await saved;
    this.viewOf(message)?.update(conversation, this.actions);
    if (this.conversation === conversation) this.drawState();
    announce(endInWords(message));
    if (message.unreachable) await serverBack();
    // A server that was started again may have other models, and a model that was loaded has a context.
    const isNew = message.unreachable || message.status === 404;
    if (isNew || (message.finish !== "error" && !this.model?.max_model_len)) await this.readModels();
  }

  viewOf(message) {
    return this.views.find((view) => view.message.id === message.id);
  }

  /** Save a conversation that has new messages, or other values of these fields. */
  async save(conversation, ...fields) {
    try {
      await store.put([conversation], fields);
      this.problem("save", "");
    } catch (error) {
      this.problem("save", error.message, () => this.save(conversation, ...fields));
    }
    this.changed();
  }

  scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    // Text that grows below leaves scrollTop as it is: a smaller one means that the reader scrolled up.
    if (scrollHeight - scrollTop - clientHeight < NEAR) this.sticks = true;
    else if (scrollTop < this.top) this.sticks = false;
    this.top = scrollTop;
    byId("to-end").hidden = this.sticks;
  }

  follow() {
    if (this.sticks) this.scroller.scrollTop = this.scroller.scrollHeight;
    this.scrolled();
  }
}

function title(text) {
  const line = text.split("\n", 1)[0].trim();
  const characters = Array.from(line);  // not UTF-16 units, which would halve an emoji
  return characters.length > 60 ? `${characters.slice(0, 59).join("")}…` : line;
}

function endInWords(message) {
  if (message.finish === "error") return "";  // its role "alert" is read
  if (message.finish === "stopped") return "Stopped";
  return message.usage ? `The answer is complete: ${message.usage.completion_tokens} tokens` : "The answer is complete";
}

