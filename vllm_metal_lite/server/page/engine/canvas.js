// Helpers of both canvases: sharp lines on every screen, and a tip at the pointer.

import { byId, make } from "../dom.js";

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

/** look(x, y): lines of a tip for a place, or null.  left(): the pointer has gone. */
export function showTips(canvas, look, left) {
  const tip = byId("tip");
  canvas.addEventListener("pointermove", (event) => {
    const lines = look(event.offsetX, event.offsetY);
    tip.hidden = !lines;
    if (!lines) return;
    tip.replaceChildren(...lines.map((line) => make("div", {}, line)));
    const panel = tip.parentElement.getBoundingClientRect();
    const x = Math.min(event.clientX - panel.left + 14, panel.width - tip.offsetWidth - 8);
    const y = event.clientY - panel.top + 18;
    tip.style.left = `${Math.max(8, x)}px`;
    tip.style.top = `${Math.min(y, panel.height - tip.offsetHeight - 8)}px`;
  });
  canvas.addEventListener("pointerleave", () => {
    tip.hidden = true;
    left();
  });
}
