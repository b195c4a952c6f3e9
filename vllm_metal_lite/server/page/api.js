// Requests to the server: the API key, errors in words, streams of events.

const KEY = "metal-lite-key";

export class ApiError extends Error {
  /** status: of the response; 0: none, or the stream broke off.  unreachable: no response came. */
  constructor(message, status, unreachable = false) {
    super(message);
    Object.assign(this, { status, unreachable });
  }
}

let apiKey = null;
try { apiKey = sessionStorage.getItem(KEY); } catch { /* the browser keeps nothing */ }
let dialog = async () => null;
let asking = null;  // requests that are refused at the same time share a dialog

/** ask: shows a dialog; resolves to a key, or to null. */
export function onKeyNeeded(ask) {
  dialog = ask;
}

/** Ask for a key and keep it until the tab closes; false: none was given. */
function askForKey(problem) {
  asking ??= dialog(problem).then((key) => {
    asking = null;
    if (!key) return false;
    if (/[^\x20-\xff]/.test(key)) return askForKey("The key has a character that no HTTP header can carry.");
    apiKey = key;
    try { sessionStorage.setItem(KEY, key); } catch { /* only until this page is closed */ }
    document.dispatchEvent(new Event("key"));
    return true;
  });
  return asking;
}

/**
 * fetch with the key.  Raises ApiError, or AbortError if `signal` ends the request.
 * asks: whether a refused key may open a dialog.
 */
export async function request(path, { body, signal, asks = true } = {}) {
  for (let attempt = 0; ; attempt++) {
    const headers = {};
    const key = apiKey;
    if (key) headers.Authorization = `Bearer ${key}`;
    if (body) headers["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(path, {
        method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body),
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server does not answer. Is it running?", 0, true);
    }
    if (response.ok) return response;
    const message = await errorMessage(response);
    const mayAsk = response.status === 401 && asks && attempt < 3;
    if (mayAsk && (await askForKey(key ? message : ""))) continue;
    throw new ApiError(message, response.status);
  }
}

let back = null;

/** Resolves when the server answers again. */
export function serverBack() {
  back ??= (async () => {
    do await new Promise((resolve) => setTimeout(resolve, 2000));
    while (!(await fetch("/health").then(() => true, () => false)));
    back = null;
  })();
  return back;
}

async function errorMessage(response) {
  try {
    const { error } = await response.json();
    if (error?.message) return error.message;
  } catch { /* no JSON */ }
  return `The server answered ${response.status} ${response.statusText}.`;
}

/** The events of a response, as { event, data }: text/event-stream.  Comments are left out. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = "message";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line === "") {
          if (data.length) yield { event, data: data.join("\n") };
          event = "message";
          data = [];
        } else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line.startsWith("event:")) event = line.slice(6).trim();
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection to the server was lost.", 0);
  } finally {
    reader.cancel().catch(() => {});
  }
}
