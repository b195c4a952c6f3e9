// Colours code.  A grammar is loaded when the first block of its language is shown.

import hljs from "./vendor/highlight/core.min.js";

const NAMES = {  // of each grammar
  bash: "bash sh shell zsh console", cpp: "cpp c c++ cc cxx h hpp metal cuda", css: "css", diff: "diff patch",
  go: "go golang", java: "java", javascript: "javascript js jsx mjs", json: "json jsonc", markdown: "markdown md",
  python: "python py python3", rust: "rust rs", sql: "sql", swift: "swift", typescript: "typescript ts tsx",
  xml: "xml html svg", yaml: "yaml yml",
};
const GRAMMARS = new Map(
  Object.entries(NAMES).flatMap(([grammar, names]) => names.split(" ").map((name) => [name, grammar])),
);
const MAX_CHARACTERS = 50_000;  // longer code would hold up the page

async function load(grammar) {
  try {
    const module = await import(`./vendor/highlight/${grammar}.min.js`);
    hljs.registerLanguage(grammar, module.default);
  } catch { /* the next block of this language tries again */ }
}

/** Colour an element, now or once its grammar is loaded. */
export async function colour(code, language) {
  const grammar = GRAMMARS.get(language.toLowerCase());
  if (!grammar || code.textContent.length > MAX_CHARACTERS) return;
  if (!hljs.getLanguage(grammar)) await load(grammar);
  if (!hljs.getLanguage(grammar)) return;
  const { value } = hljs.highlight(code.textContent, { language: grammar, ignoreIllegals: true });
  code.replaceChildren(window.DOMPurify.sanitize(value, {
    ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true,
  }));
}
