// Helpers of both canvases: sharp lines on every screen, and a tip at the pointer.

import { announce, byId, make } from "../dom.js";

const STEP = 12;  // pixels
const ARROWS = { ArrowLeft: [-STEP, 0], ArrowRight: [STEP, 0], ArrowUp: [0, -STEP], ArrowDown: [0, STEP] };

/** Fit a canvas to its place; returns its context in CSS pixels. */
export function fit(canvas, height) {
  const width = canvas.clientWidth;
  const scale = devicePixelRatio || 1;
  if (canvas.height !== Math.round(height * scale) || canvas.width !== Math.round(width * scale)) {
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** look(x, y): lines of a tip for a place, or null.  left(): called when nothing is pointed at.  Arrow keys point as a mouse does. */
export function showTips(canvas, look, left) {
  const tip = byId("tip");
  let [atX, atY] = [canvas.width / 2, canvas.height / 2];
  const show = (x, y) => {
    const lines = look(x, y);
    [atX, atY] = [x, y];
    tip.hidden = !lines;
    if (!lines) return [];
    tip.replaceChildren(...lines.map((line) => make("div", {}, line)));
    const panel = tip.parentElement.getBoundingClientRect();
    const place = canvas.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(place.left - panel.left + x + 14, panel.width - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.min(place.top - panel.top + y + 18, panel.height - tip.offsetHeight - 8)}px`;
    return lines;
  };
  const hide = () => {
    tip.hidden = true;
    left();
  };
  canvas.addEventListener("pointermove", (event) => show(event.offsetX, event.offsetY));
  canvas.addEventListener("pointerleave", hide);
  canvas.addEventListener("blur", hide);
  canvas.addEventListener("keydown", (event) => {
    const [right, down] = ARROWS[event.key] ?? [];
    if (right === undefined) return;
    event.preventDefault();
    const within = (value, most) => Math.max(0, Math.min(value, most - 1));
    announce(show(within(atX + right, canvas.clientWidth), within(atY + down, canvas.clientHeight)).join(". "));
  });
}
