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

/** Tell screen readers. */
export function announce(text) {
  byId("status").textContent = text;
}

/** 1234567 -> "1,234,567" */
export const count = (n) => Math.round(n).toLocaleString("en-US");

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
  button.classList.add("done");
  announce("Copied");
  setTimeout(() => button.classList.remove("done"), 1200);
}
