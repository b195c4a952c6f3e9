// Models that think first write their thoughts between tags, in the text of the answer.

const OPEN = "<think>";
const CLOSE = "</think>";

/**
 * The thoughts and the answer in a text that may still grow.
 * Some chat templates write the opening tag into the prompt, so the text may hold only the closing one.
 */
export function split(text) {
  const start = text.trimStart();
  if (OPEN.startsWith(start) && start) return { reasoning: "", answer: "", thinking: true };
  const end = text.indexOf(CLOSE);
  if (start.startsWith(OPEN)) {
    if (end < 0) {
      const partial = start.slice(OPEN.length);
      return { reasoning: withoutTail(partial).trim(), answer: "", thinking: true };
    }
    const begin = text.indexOf(OPEN) + OPEN.length;
    return {
      reasoning: text.slice(begin, end).trim(),
      answer: text.slice(end + CLOSE.length).trimStart(),
      thinking: false,
    };
  }
  // A closing tag alone, on a line of its own.
  const alone = /^[^`]*?\n?<\/think>\s*\n/.exec(text);
  if (alone) {
    return {
      reasoning: text.slice(0, end).trim(),
      answer: text.slice(end + CLOSE.length).trimStart(),
      thinking: false,
    };
  }
  return { reasoning: "", answer: text, thinking: false };
}

/** Without the first characters of a closing tag at the end. */
function withoutTail(text) {
  for (let n = CLOSE.length - 1; n > 0; n--) {
    if (text.endsWith(CLOSE.slice(0, n))) return text.slice(0, -n);
  }
  return text;
}
