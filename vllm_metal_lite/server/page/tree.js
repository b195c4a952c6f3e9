// A conversation is a tree of messages: asking again keeps the older answers beside the new one.
//
// {id, title, updated, model, system, sampling, messages: [{id, parent, role, content, ...}],
//  leaf: id of the last message shown, or null}

export const newId = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(8)), (b) => b.toString(16).padStart(2, "0")).join("");

export const UNTITLED = "New conversation";

export function newConversation(defaults) {
  return {
    id: newId(), title: UNTITLED, updated: Date.now(),
    model: defaults.model ?? null, system: defaults.system ?? "",
    sampling: { ...defaults.sampling }, messages: [], leaf: null,
  };
}

export const find = (conversation, id) => conversation.messages.find((m) => m.id === id) ?? null;

/** The messages that are shown, from the first to the leaf. */
export function path(conversation) {
  const byId = new Map(conversation.messages.map((m) => [m.id, m]));
  const shown = [];
  for (let m = byId.get(conversation.leaf); m; m = byId.get(m.parent)) shown.push(m);
  return shown.reverse();
}

/** Add a message below `parent` (an id or null), and show it. */
export function append(conversation, parent, message) {
  const added = { id: newId(), parent, ...message };
  conversation.messages.push(added);
  conversation.leaf = added.id;
  conversation.updated = Date.now();
  return added;
}

/** The messages with the parent and the role of this one, oldest first. */
export const versions = (conversation, message) =>
  conversation.messages.filter((m) => m.parent === message.parent && m.role === message.role);

/** Show a message, and the latest below it. */
export function show(conversation, message) {
  for (let last = message; last;) {
    conversation.leaf = last.id;
    last = conversation.messages.findLast((m) => m.parent === conversation.leaf);
  }
}

const progress = (m) => (m.endedAt ? Infinity : m.content.length + (m.reasoning?.length ?? 0));

/** Take the messages that another copy of the conversation has, such as another tab's, and its longer answers. */
export function merge(conversation, other) {
  const others = new Map(other.messages.map((m) => [m.id, m]));
  const mine = conversation.messages.map((m) => {
    const copy = others.get(m.id);
    others.delete(m.id);
    return copy && progress(copy) > progress(m) ? copy : m;
  });
  conversation.messages = [...mine, ...others.values()];
  show(conversation, find(conversation, conversation.leaf));
}

/** The answers that are not complete. */
export const growing = (conversation) => conversation.messages.filter((m) => m.finish === null);

/** Stop an answer that is not complete, in a new message. */
export function stop(conversation, id) {
  conversation.messages = conversation.messages.map((m) =>
    m.id === id && m.finish === null ? { ...m, finish: "stopped" } : m);
}
