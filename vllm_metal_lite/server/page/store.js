// Conversations, kept in this browser (IndexedDB).  Without it they last as long as the page.

import { merge } from "./tree.js";

const DATABASE = "vllm-metal-lite";
const STORE = "conversations";

const channel = new BroadcastChannel(DATABASE);
const saved = new Set();  // ids of conversations that were stored; a missing one was deleted
let opened = null;

/** listener: called with the id of a conversation that another tab has changed. */
export function onChange(listener) {
  channel.addEventListener("message", (event) => listener(event.data));
}

function database() {
  opened ??= new Promise((resolve) => {
    try {
      const opening = indexedDB.open(DATABASE, 1);
      opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, { keyPath: "id" });
      opening.onsuccess = () => resolve(opening.result);
      opening.onerror = () => resolve(null);
    } catch {
      resolve(null);
    }
  });
  return opened;
}

async function run(mode, work) {
  const db = await database();
  return new Promise((resolve, reject) => {
    const transaction = db.transaction(STORE, mode);
    const asked = work(transaction.objectStore(STORE));
    transaction.oncomplete = () => resolve(asked?.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

/** False: the browser keeps nothing, as some do in private windows. */
export const keeps = async () => (await database()) !== null;

/** All conversations. */
export async function all() {
  if (!(await keeps())) return [];
  const found = await run("readonly", (store) => store.getAll());
  for (const c of found) saved.add(c.id);
  return found;
}

/** The stored conversation; undefined: it was deleted. */
export async function get(id) {
  saved.add(id);
  return run("readonly", (store) => store.get(id));
}

/**
 * Save conversations, all or none; raises an Error that the page can show.  Messages are merged into a stored
 * conversation; of its fields, only `fields` are replaced.  growing: other tabs are not told yet.
 */
export async function put(conversations, fields = [], growing = false) {
  if (!(await keeps())) return;
  await run("readwrite", (store) => {
    for (const c of conversations) {
      store.get(c.id).onsuccess = ({ target: { result: stored } }) => {
        if (!stored && saved.has(c.id)) return;  // another tab has deleted it
        if (stored) merge(Object.assign(stored, Object.fromEntries(fields.map((name) => [name, c[name]]))), c);
        store.put(stored ?? c);
      };
    }
  }).catch(({ name, message }) => {
    const what = conversations.length === 1 ? `“${conversations[0].title}”` : `${conversations.length} conversations`;
    throw new Error(`The browser could not save ${what} (${message || name}). Export or delete conversations, then try again.`);
  });
  for (const { id } of conversations) {
    saved.add(id);
    if (!growing) channel.postMessage(id);
  }
}

export async function remove(id) {
  saved.add(id);
  if (!(await keeps())) return;
  await run("readwrite", (store) => store.delete(id));
  channel.postMessage(id);
}

/** A setting of the page, as JSON. */
export function setting(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(`metal-lite-${name}`)) ?? fallback;
  } catch {
    return fallback;
  }
}

export function keepSetting(name, value) {
  try {
    localStorage.setItem(`metal-lite-${name}`, JSON.stringify(value));
  } catch { /* only this visit */ }
}
