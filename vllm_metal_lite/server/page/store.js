// Conversations, kept in this browser (IndexedDB).  Without it they last as long as the page.

const DATABASE = "vllm-metal-lite";
const STORE = "conversations";

const channel = new BroadcastChannel(DATABASE);
const memory = new Map();
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
    transaction.oncomplete = () => resolve(asked.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

/** False: the browser keeps nothing, as some do in private windows. */
export const keeps = async () => (await database()) !== null;

/** All conversations, the latest first. */
export async function all() {
  const found = (await keeps())
    ? await run("readonly", (store) => store.getAll())
    : [...memory.values()];
  return found.sort((a, b) => b.updated - a.updated);
}

/** Keep a conversation; raises an Error in words.  growing: other tabs need not know yet. */
export async function put(conversation, growing = false) {
  if (!(await keeps())) return void memory.set(conversation.id, conversation);
  await run("readwrite", (store) => store.put(conversation)).catch(({ name, message }) => {
    throw new Error(`The browser could not save “${conversation.title}” (${message || name}). Export or delete conversations, then try again.`);
  });
  if (!growing) channel.postMessage(conversation.id);
}

export async function remove(id) {
  if (!(await keeps())) return void memory.delete(id);
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
