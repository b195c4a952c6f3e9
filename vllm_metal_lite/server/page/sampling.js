// The settings of a conversation, as fields of a request and in words.

export const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
  "max_tokens", "seed",
];

/** The JSON object in a text; null: there is none. */
export function parsed(text) {
  try {
    const value = JSON.parse(text);
    return value && typeof value === "object" && !Array.isArray(value) ? value : null;
  } catch {
    return null;
  }
}

/** sampling: numbers by NUMBERS; stop: strings; thinking: true or false; schema: JSON as text. */
export function fields(sampling) {
  const body = Object.fromEntries(
    NUMBERS.filter((name) => typeof sampling[name] === "number").map((name) => [name, sampling[name]]),
  );
  if (sampling.stop?.length) body.stop = sampling.stop;
  const schema = sampling.schema && parsed(sampling.schema);
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (sampling.thinking === false) body.reasoning_effort = "none";
  if (sampling.thinking === true) {  // models differ in the name
    body.chat_template_kwargs = { enable_thinking: true, thinking: true };
  }
  return body;
}

/** The differences from the model's defaults, in words; "": none. */
export function inEffect({ system, sampling }) {
  const words = NUMBERS.filter((name) => typeof sampling[name] === "number")
    .map((name) => `${name.replaceAll("_", " ")} ${sampling[name]}`);
  if (typeof sampling.thinking === "boolean") words.push(`thinking ${sampling.thinking ? "on" : "off"}`);
  if (sampling.stop?.length) words.push("stop strings");
  if (sampling.schema) words.push("JSON schema");
  if (system.trim()) words.push(`system prompt: ${system.trim().replace(/\s+/g, " ").slice(0, 200)}`);
  const text = words.join(" · ");
  return text && text[0].toUpperCase() + text.slice(1);
}

/** The settings of new conversations. */
export function kept({ stop, schema, ...rest }) {
  return rest;
}
