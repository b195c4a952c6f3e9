// The list of conversations.

import { ask, confirmed } from "./dialogs.js";
import { byId, iconButton, make } from "./dom.js";
import { download } from "./export.js";

/** Whether a title or a message holds each of these words. */
function holds(conversation, words) {
  const text = [conversation.title, ...conversation.messages.map((m) => m.content)].join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}

/** The row of a conversation: its title and its buttons. */
function row(conversation, current, running, actions) {
  const { id, title } = conversation;
  const rename = async () => {
    const name = await ask("Conversation name", title);
    if (!name) return;
    conversation.title = name;
    actions.renamed(conversation);
  };
  const remove = async () => {
    if (await confirmed(`Delete “${title}”? This cannot be undone.`, "Delete")) actions.removed(conversation);
  };
  const open = make(
    "button",
    { type: "button", class: "title", id: `open-${id}`, title, onclick: () => actions.open(conversation) },
    make("span", { dir: "auto" }, title),
  );
  if (current) open.setAttribute("aria-current", "page");
  if (running) open.append(make("span", { class: "pulse", role: "img", "aria-label": "being answered" }));
  return make(
    "li", {}, open,
    make("span", { class: "tools" },
      iconButton("edit", `Rename ${title}`, rename, { id: `rename-${id}` }),
      iconButton("down", `Export ${title} as JSON`, () => download(title, conversation), { id: `export-${id}` }),
      iconButton("delete", `Delete ${title}`, remove, { id: `delete-${id}` })),
  );
}

/**
 * Draw the conversations that are searched for.
 * current: the one that is shown.  running: has the ids of those that are answered.
 * actions: open, renamed and removed, all of a conversation.
 */
export function drawList(conversations, current, running, actions) {
  const sought = byId("search").value.trim();
  const words = sought.toLowerCase().split(/\s+/);
  const found = sought ? conversations.filter((c) => holds(c, words)) : conversations;
  byId("no-match").textContent = found.length || !sought ? "" : `No conversation contains “${sought}”.`;
  const focused = document.activeElement.id;
  byId("conversations").replaceChildren(...found.map((c) => row(c, c === current, running.has(c.id), actions)));
  byId(focused)?.focus();  // the buttons are new ones
}
