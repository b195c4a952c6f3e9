// Asks /v1/chat/completions for one answer, and fills a message with it.

import { ApiError, events, request } from "./api.js";
import { contentOf, joined } from "./attachments.js";
import { fields } from "./sampling.js";

/** The body of a request for an answer to `shown`, messages of a conversation. */
export function bodyOf(conversation, shown) {
  const messages = conversation.system.trim()
    ? [{ role: "system", content: conversation.system.trim() }]
    : [];
  for (const m of shown) {
    const content = m.role === "user" ? contentOf(m) : m.content;
    const last = messages.at(-1);
    // After an answer that failed, two questions become one: many chat templates want roles in turns.
    if (m.role === "user" && last?.role === "user") last.content = joined(last.content, content);
    else if (m.role === "user" || content) messages.push({ role: m.role, content });
  }
  return {
    model: conversation.model, messages, stream: true, stream_options: { include_usage: true },
    ...fields(conversation.sampling),
  };
}

/**
 * Fill `message` (content, reasoning, usage, times, finish; error, status, unreachable) until the answer ends or `signal`
 * stops it.  changed: called after each piece.
 */
export async function answer(message, body, signal, changed) {
  message.startedAt = Date.now();
  try {
    const response = await request("/v1/chat/completions", { body, signal });
    let ended = false;
    let finish = null;
    for await (const { data } of events(response)) {
      if (data === "[DONE]") {
        ended = true;  // the response ends here by itself
        continue;
      }
      finish = addChunk(message, JSON.parse(data)) ?? finish;
      changed();
    }
    if (!ended) throw new ApiError("The answer was cut off.", 0);
    message.finish = finish ?? "stop";
  } catch (error) {
    if (error.name === "AbortError") message.finish = "stopped";
    else {
      message.finish = "error";
      message.error = error instanceof ApiError ? error.message : `The page failed: ${error.message}`;
      message.unreachable = error.unreachable;
      message.status = error.status;
    }
  }
  message.endedAt = Date.now();
}

/** Add a chunk to a message; returns the reason if the answer ends with it. */
function addChunk(message, chunk) {
  if (chunk.error) throw new ApiError(chunk.error.message ?? "The server failed.", 500);
  if (chunk.usage) message.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return null;
  const delta = choice.delta ?? {};
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (thought) message.reasoning = (message.reasoning ?? "") + thought;
  if (delta.content) message.content += delta.content;
  if ((thought || delta.content) && !message.firstAt) message.firstAt = Date.now();
  return choice.finish_reason ?? null;
}
