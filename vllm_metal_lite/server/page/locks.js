// Which tab receives an answer: that tab holds a lock with the answer's id until the answer ends.

const known = new Set();  // ids of answers that this tab receives or waits for, now or before

/** Let other tabs know that this one receives an answer, until `ended` resolves. */
export function hold(id, ended) {
  known.add(id);
  navigator.locks?.request(id, () => ended).catch(() => {});
}

/**
 * Call `listener` once the tab that receives the answer has ended or was closed; never if this is that tab.
 * Without locks, as over plain HTTP, the call comes at once.
 */
export async function onRelease(id, listener) {
  if (known.has(id)) return;
  known.add(id);
  await navigator.locks?.request(id, () => {}).catch(() => {});
  listener();
}
