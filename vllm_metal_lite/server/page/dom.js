// Small helpers to make elements.

/** The element with an id. */
export const byId = (id) => document.getElementById(id);

/** An element.  Properties that begin with "on" are listeners; "class" and "aria-..." attributes. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/** An icon of the sprite in index.html. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

/** A button with an icon; `label` is read out and shown as a tooltip. */
export const iconButton = (name, label, onclick, properties = {}) =>
  make("button", {
    type: "button", class: "quiet", "aria-label": label, title: label, onclick, ...properties,
  }, icon(name));

/** Make elements the children of `parent`.  Those that stay are not moved, which would take their focus. */
export function place(parent, elements) {
  for (const child of [...parent.children]) if (!elements.includes(child)) child.remove();
  elements.forEach((element, i) => {
    if (parent.children[i] !== element) parent.insertBefore(element, parent.children[i] ?? null);
  });
}

/** Tell screen readers. */
export function announce(text) {
  byId("status").textContent = text;
}

/** 1234567 -> "1,234,567" */
export const count = (n) => Math.round(n).toLocaleString("en-US");

/** A time in words: "3.4 ms", "250 ms", "1.38 s". */
export function duration(ms) {
  if (ms < 99.95 && !Number.isInteger(ms)) return `${ms.toFixed(1)} ms`;
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  const s = ms / 1000;
  return `${s.toFixed(s < 9.95 ? 2 : s < 99.5 ? 1 : 0)} s`;
}

/** Whether a key in a text area sends the text: Enter without Shift, outside an input method's composition. */
export const sends = (event) =>  // Safari ends a composition before its Enter, which has the code 229
  event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;

/** Make a text area as high as its text. */
export function grow(area, most) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + area.offsetHeight - area.clientHeight, most)}px`;
}

/** Draws once in a frame, however often it is requested, and less often if that is slow. */
export class Drawing {
  constructor(draw) {
    this.draw = draw;
    this.frame = 0;
    this.pause = 0;
    this.drawnAt = 0;
  }

  request() {
    this.frame ||= requestAnimationFrame(() => this.run());
  }

  cancel() {
    cancelAnimationFrame(this.frame);
  }

  run() {
    this.frame = 0;
    const now = performance.now();
    if (now - this.drawnAt < this.pause) return this.request();
    this.draw();
    this.drawnAt = performance.now();
    this.pause = 3 * (this.drawnAt - now);
  }
}

/** Copy, and say so on the button for a moment. */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // without the permission, or an address that is not loopback
    const area = make("textarea", { class: "offscreen" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const show = (done) => {
    button.classList.toggle("done", done);
    button.querySelector("use").setAttribute("href", done ? "#i-check" : "#i-copy");
  };
  show(true);
  announce("Copied");
  setTimeout(() => show(false), 1500);
}
