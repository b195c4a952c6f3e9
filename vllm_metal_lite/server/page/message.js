// One message on the screen.

import { serverBack } from "./api.js";
import { fileView } from "./attachments.js";
import { copy, count, duration, grow, icon, iconButton, make, sends } from "./dom.js";
import { Growing } from "./markdown.js";
import { versions } from "./tree.js";

/** The cost of an answer, in words. */
function cost(message) {
  const { usage, firstAt, endedAt, startedAt } = message;
  const shown = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    shown.push(`${count(usage.prompt_tokens)} tokens in${cached ? ` (${count(cached)} cached)` : ""}`);
    shown.push(`${count(usage.completion_tokens)} out`);
  }
  if (firstAt) shown.push(`first after ${duration(firstAt - startedAt)}`);
  // Not of tokens that came at once.
  if (usage && endedAt - firstAt > 20 && usage.completion_tokens > 1) {
    const rate = (1000 * (usage.completion_tokens - 1)) / (endedAt - firstAt);
    shown.push(`${rate < 100 ? rate.toFixed(1) : count(rate)} tokens/s`);
  }
  if (message.finish === "length") shown.push("cut off at the token limit");
  if (message.finish === "stopped") {
    shown.push(endedAt ? `stopped after ${duration(endedAt - startedAt)}` : "stopped");
  }
  return shown;
}

/** The view of a message.  actions: edit, regenerate, show, all of a message. */
export class MessageView {
  constructor(conversation, message, actions) {
    this.message = message;
    this.numVersions = versions(conversation, message).length;
    const mine = message.role === "user";
    this.body = make("div", { class: "text", dir: mine ? "auto" : "ltr" });
    this.element = make(
      "article",
      { class: `message ${message.role}`, "aria-label": mine ? "You" : "Answer", "data-id": message.id },
      this.body,
    );
    if (mine) {
      this.body.textContent = message.content;
      this.body.hidden = !message.content;
      this.element.prepend(...(message.files ?? []).map(fileView));
      this.element.append(this.buttons(conversation, actions));
    } else {
      this.thoughts = null;
      this.wait = make("p", { class: "waiting row" }, make("span", { class: "pulse" }), "Waiting for the first token");
      this.foot = make("div", { class: "foot" });
      this.growing = new Growing(this.body);
      this.element.append(this.wait, this.foot);
      this.update(conversation, actions);
    }
  }

  /** Show the message as it is now.  Cheap while it grows. */
  update(conversation, actions) {
    const { message } = this;
    const { reasoning, content } = message;
    const running = message.finish === null;
    this.element.setAttribute("aria-busy", String(running));
    this.wait.hidden = !running || Boolean(reasoning || content);
    if (reasoning) this.showThoughts(reasoning, running && !content);
    if (content !== this.shown || !running) this.growing.show(content, !running);
    this.shown = content;
    if (running) return;
    this.foot.replaceChildren();
    if (message.error) this.foot.append(this.problem(message, actions));
    else if (!content && !reasoning) {
      const stopped = message.finish === "stopped";
      const words = stopped ? "Stopped before the first token." : "The model gave an empty answer.";
      this.foot.append(make("p", { class: "note" }, words));
    }
    const line = make("p", { class: "cost" });
    cost(message).forEach((text) => line.append(make("span", {}, text)));
    this.foot.append(make("div", { class: "foot-line" }, this.buttons(conversation, actions), line));
  }

  showThoughts(text, open) {
    if (!this.thoughts) {
      this.title = make("span");
      this.thoughtText = make("div", { class: "thoughts", dir: "auto" });
      this.thoughts = make(
        "details", { class: "reasoning" }, make("summary", {}, icon("chevron"), this.title), this.thoughtText,
      );
      this.element.insertBefore(this.thoughts, this.body);
    }
    this.title.textContent = open ? "Thinking" : "Thoughts";
    this.thoughts.classList.toggle("open-ended", open);
    this.thoughtText.textContent = text;
  }

  problem(message, actions) {
    const words = make("p", {}, message.error);
    const box = make(
      "div", { class: "problem", role: "alert" }, words,
      make("button", { type: "button", onclick: () => actions.regenerate(message) }, "Try again"),
    );
    if (message.unreachable) {
      serverBack().then(() => {
        box.classList.add("over");
        words.textContent = "The server did not answer, but it is back now.";
      });
    }
    return box;
  }

  buttons(conversation, actions) {
    const { message } = this;
    const mine = message.role === "user";
    const row = make("div", { class: "actions" });
    const all = versions(conversation, message);
    if (all.length > 1) {
      const at = all.indexOf(message);
      const step = (by, name, label) =>
        iconButton(name, label, () => actions.show(all[at + by]), { disabled: !all[at + by] });
      row.append(
        step(-1, "back", "Previous version"),
        make("span", { class: "version" }, `${at + 1} of ${all.length}`),
        step(1, "chevron", "Next version"),
      );
    }
    const copying = iconButton("copy", mine ? "Copy message" : "Copy answer", () => copy(message.content, copying));
    row.append(copying);
    if (mine) row.append(iconButton("edit", "Edit and ask again", () => this.edit(actions)));
    else row.append(iconButton("again", "Answer again", () => actions.regenerate(message)));
    return row;
  }

  edit(actions) {
    if (this.element.classList.contains("editing")) return;
    const area = make("textarea", { rows: 1, dir: "auto", "aria-label": "Edit your message", oninput: () => grow(area, 400) });
    area.value = this.message.content;
    const close = () => {
      form.remove();
      this.element.classList.remove("editing");
      this.element.querySelector("[aria-label^=Edit]")?.focus();
    };
    const send = () => {
      const text = area.value.trim();
      if (text || this.message.files?.length) actions.edit(this.message, text);
    };
    const form = make(
      "form", { class: "edit", onsubmit: (event) => { event.preventDefault(); send(); } },
      area,
      make("div", { class: "row" },
        make("button", { type: "button", onclick: close }, "Cancel"),
        make("button", { type: "submit", class: "main" }, "Ask again")),
    );
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.isComposing) {
        event.stopPropagation();
        close();
      } else if (sends(event)) {
        event.preventDefault();
        send();
      }
    });
    this.element.classList.add("editing");
    this.element.append(form);
    grow(area, 400);
    area.focus();
  }
}
