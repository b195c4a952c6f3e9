// Markdown of a model to elements.  Nothing in it may run, load or look like a part of the page.

import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";
import { colour } from "./code.js";
import { copy, iconButton, make } from "./dom.js";

const escaped = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

// Formulas stay as they are written: Markdown would take their backslashes, stars and underscores.
const INLINE = /^(?:\$\$[^$]+\$\$|\$(?![\s$])(?=[^$\n]*[\\^_{=+<>]|\w\$)(?:\\.|[^\\$\n])*(?:\\.|[^\\$\s])\$(?!\w)|\\\([^]{1,999}?\\\)|\\\[[^]{1,999}?\\\])/;
const BLOCK = /^ {0,3}(?:\$\$([^$]+)\$\$|\\\[([^]{1,9999}?)\\\]) *(?:\n|$)/;
const formula = (level, start, pattern, renderer) => {
  const name = `formula-${level}`;
  const tokenizer = (text) => {
    const found = pattern.exec(text);
    return found && { type: name, raw: found[0], text: (found[1] ?? found[2] ?? "").trim() };
  };
  return { name, level, start: (text) => text.match(start)?.index, tokenizer, renderer };
};

const marked = new Marked({
  gfm: true,
  extensions: [
    formula("inline", /\$|\\[([]/, INLINE, ({ raw }) => `<code>${escaped(raw)}</code>`),
    formula("block", /^ {0,3}(?:\$\$|\\\[)/m, BLOCK, ({ text }) => `<pre><code class="language-latex">${escaped(text)}</code></pre>`),
  ],
  renderer: {
    // An image would be fetched, which tells its host what is read here; a link is not.
    image: ({ href, text }) =>
      `<a href="${escaped(href)}">[image: ${escaped(text || href)}]</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    // HTML is shown as it was written, except for breaks, which tables need.
    html: ({ text, block }) => {
      if (/^<br\s*\/?>$/i.test(text.trim())) return "<br>";
      return block ? `<p>${escaped(text.trimEnd()).replaceAll("\n", "<br>")}</p>` : escaped(text);
    },
  },
});
const purify = window.DOMPurify;

const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol",
    "p", "pre", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["align", "href", "class", "start", "title"],
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

purify.addHook("afterSanitizeAttributes", (node) => {
  const language = /^language-[\w+#.-]{1,30}$/.exec(node.className ?? "");
  if (node.tagName === "CODE" && language) node.setAttribute("class", language[0]);
  else if (node.tagName === "SPAN" && /^hljs-[\w -]+$/.test(node.className)) return;  // of code.js
  else node.removeAttribute("class");
  if (node.tagName === "A" && node.hasAttribute("href")) {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer");
  }
});

/** growing: the text is rendered again soon, so long code is not coloured. */
function render(tokens, growing = false) {
  const fragment = purify.sanitize(marked.parser(tokens), ALLOWED);
  for (const block of fragment.children) block.dir = block.tagName === "PRE" ? "ltr" : "auto";
  for (const code of fragment.querySelectorAll("pre > code")) frame(code, growing);
  for (const table of fragment.querySelectorAll("table")) {
    const scroll = make("div", { class: "scroll", tabIndex: 0, role: "group", "aria-label": "Table" });
    table.replaceWith(scroll);
    scroll.append(table);
  }
  return fragment;
}

/** Give a block of code its language and a button that copies it. */
function frame(code, growing) {
  const pre = code.parentElement;
  const language = code.className.replace("language-", "");
  const button = iconButton("copy", "Copy code", () => copy(code.textContent, button));
  const bar = make("div", { class: "code-bar" }, make("span", {}, language || "code"), button);
  const block = make("div", { class: "code" }, bar);
  pre.replaceWith(block);
  pre.tabIndex = 0;
  block.append(pre);
  if (!growing || code.textContent.length < 4000) colour(code, language);
}

/**
 * Shows a text that grows.  Blocks that are complete are rendered once; only the last one is
 * rendered again when text comes.
 */
export class Growing {
  constructor(parent) {
    this.parent = parent;
    this.done = 0;  // characters of the text in complete blocks
    this.tail = [];  // elements of the block that grows
  }

  /** text: all of it.  finished: render all of it once more, since links may be defined at its end. */
  show(raw, finished) {
    try {
      this.render(raw.replace(/\r\n?/g, "\n"), finished);  // as the lexer does
    } catch {  // such as text nested so deeply that the lexer's recursion overflows the stack
      this.done = 0;
      this.tail = [make("pre", {}, raw)];
      this.parent.replaceChildren(...this.tail);
    }
  }

  render(text, finished) {
    if (finished) {
      this.parent.replaceChildren(render(marked.lexer(text)));
      return;
    }
    const tokens = marked.lexer(text.slice(this.done));
    for (const node of this.tail) node.remove();
    let whole = tokens.length - 1;
    while (whole > 0 && tokens[whole].type === "space") whole--;
    if (whole > 0) {
      this.parent.append(render(tokens.slice(0, whole)));
      for (const token of tokens.slice(0, whole)) this.done += token.raw.length;
    }
    const fragment = render(tokens.slice(Math.max(whole, 0)), true);
    this.tail = [...fragment.childNodes];
    this.parent.append(fragment);
  }
}
