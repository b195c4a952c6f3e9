// The steps: one column each, the latest at the right.

import { count, duration } from "../dom.js";
import { fit, showTips } from "./canvas.js";
import { palette } from "./colours.js";

const COLUMNS = [24, 16, 12, 9];  // pixels, with a gap of 1: the widest at which all steps fit
const LEFT = 52;
const TOP = 8;
const HEIGHT = 130;  // of the columns
const GAP = 24;
const STRIP = 26;  // of the times
const LINEAR = 4;  // tokens up to which the scale is about linear
const FONT = "12px system-ui, sans-serif";
const TICKS = [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536];

export class Timeline {
  /** hover(n): a request is pointed at; 0: none. */
  constructor(canvas, hover) {
    this.canvas = canvas;
    this.columns = [];
    this.top = 16;
    showTips(canvas, (x, y) => {
      const found = this.at(x, y);
      hover(found?.segment?.[0] ?? 0);
      return found && this.tip(found);
    }, () => hover(0));
  }

  draw(history, highlight) {
    const { canvas } = this;
    // As high without a step, so that nothing below moves under the pointer when the first comes.
    const context = fit(canvas, TOP + HEIGHT + GAP + STRIP + 4);
    const colours = palette();
    if (!history.steps.length) {
      this.columns = [];
      context.font = FONT;
      context.fillStyle = colours.text;
      context.fillText("No steps have been seen yet.", 0, TOP + HEIGHT / 2);
      canvas.setAttribute("aria-label", this.summary());
      return;
    }
    const width = canvas.clientWidth;
    const room = width - LEFT;
    this.column = COLUMNS.find((column) => column * history.steps.length <= room) ?? COLUMNS.at(-1);
    const steps = history.steps.slice(-Math.floor(room / this.column));
    const sums = steps.map((step) => step.segments.reduce((sum, [, tokens]) => sum + tokens, 0));
    const most = Math.max(16, ...sums);
    this.top = TICKS.find((tick) => tick >= most) ?? most;
    if (this.top > 1.6 * most) this.top = most;
    const y = (tokens) => TOP + HEIGHT * (1 - Math.log1p(tokens / LINEAR) / Math.log1p(this.top / LINEAR));
    this.axis(context, colours, width, y);
    this.columns = steps.map((step, i) => ({ step, sum: sums[i], x: LEFT + i * this.column }));
    for (const [n, { decodes, chunks }] of this.rectangles(y)) {
      const faint = highlight && n !== highlight ? 0.16 : 1;
      context.fillStyle = colours.request(n, faint);
      for (const rectangle of decodes) context.fillRect(...rectangle);
      if (chunks.length) this.chunks(context, colours, n, faint, chunks);
    }
    this.strip(context, colours, steps, width);
    canvas.setAttribute("aria-label", this.summary());
  }

  /** By request, since a change of colour is slow: [x, y, width, height] of its decodes and chunks. */
  rectangles(y) {
    const found = new Map();
    for (const { step, x } of this.columns) {
      let below = 0;
      let bottom = y(0);
      step.segments.forEach(([n, tokens], i) => {
        below += tokens;
        const top = y(below);
        if (!found.has(n)) found.set(n, { decodes: [], chunks: [] });
        const { decodes, chunks } = found.get(n);
        (i < step.decodes ? decodes : chunks).push([x, top, this.column - 1, Math.max(bottom - top - 0.5, 0.6)]);
        bottom = top;
      });
    }
    return found;
  }

  /** Chunks of prompts: outlines, filled lightly, so that they differ from decodes without colour. */
  chunks(context, colours, n, faint, rectangles) {
    context.fillStyle = colours.request(n, 0.36 * faint);
    for (const rectangle of rectangles) context.fillRect(...rectangle);
    context.strokeStyle = colours.request(n, 0.95 * faint);
    context.lineWidth = 1;
    for (const [x, top, width, height] of rectangles) {
      if (height >= 3) context.strokeRect(x + 0.5, top + 0.5, width - 1, height - 1);
    }
  }

  axis(context, colours, width, y) {
    context.font = FONT;
    context.textAlign = "right";
    context.textBaseline = "middle";
    let last = Infinity;
    for (const tick of [...TICKS.filter((t) => t <= this.top)].reverse()) {
      const at = Math.round(y(tick)) + 0.5;
      if (at - last < 13 && last !== Infinity) continue;
      last = at;
      context.strokeStyle = colours.line;
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(LEFT - 4, at);
      context.lineTo(width, at);
      context.stroke();
      context.fillStyle = colours.text;
      context.fillText(count(tick), LEFT - 8, at);
    }
    context.strokeStyle = colours.line;
    context.beginPath();
    context.moveTo(LEFT - 4, TOP + HEIGHT + 0.5);
    context.lineTo(width, TOP + HEIGHT + 0.5);
    context.stroke();
    context.save();
    context.translate(6, TOP + HEIGHT / 2);
    context.rotate(-Math.PI / 2);
    context.textAlign = "center";
    context.fillStyle = colours.text;
    context.fillText("tokens (log)", 0, 0);
    context.restore();
  }

  /** The time of each step, linear from 0. */
  strip(context, colours, steps, width) {
    const base = TOP + HEIGHT + GAP + STRIP;
    const most = Math.max(...steps.map((step) => step.ms), 0.1);
    context.fillStyle = colours.text;
    context.textAlign = "right";
    context.fillText(duration(most), LEFT - 8, base - STRIP + 4);
    context.fillText("0", LEFT - 8, base - 4);
    context.textAlign = "left";
    context.fillText("time of each step", LEFT - 4, base - STRIP - 9);
    context.fillStyle = colours.cached;
    for (const { step, x } of this.columns) {
      const height = Math.max(1, (STRIP * step.ms) / most);
      context.fillRect(x, base - height, this.column - 1, height);
    }
    context.fillStyle = colours.line;
    context.fillRect(LEFT - 4, base, width - LEFT + 4, 1);
  }

  /** The column and the segment at a place. */
  at(x, y) {
    const column = this.columns.find((c) => x >= c.x && x < c.x + this.column);
    if (!column || y > TOP + HEIGHT + GAP + STRIP) return null;
    const tokens = LINEAR * Math.expm1((1 - (y - TOP) / HEIGHT) * Math.log1p(this.top / LINEAR));
    let below = 0;
    for (const [i, segment] of column.step.segments.entries()) {
      if (y <= TOP + HEIGHT && tokens >= below && tokens < below + segment[1]) return { ...column, segment, i };
      below += segment[1];
    }
    return { ...column, segment: null };
  }

  tip({ step, sum, segment, i }) {
    const chunks = step.segments.length - step.decodes;
    const lines = [
      `Step ${count(step.number)}: ${duration(step.ms)}, ${count(sum)} tokens`,
      `${step.decodes} decodes, ${chunks} prompt chunks`,
    ];
    if (segment) {
      const [n, tokens, context] = segment;
      lines.push(
        i < step.decodes
          ? `Request ${n}: ${tokens > 1 ? `1 token and ${tokens - 1} drafts` : "1 token"} after ${count(context)}`
          : `Request ${n}: ${count(tokens)} tokens of its prompt after ${count(context)}`,
      );
    }
    return lines;
  }

  summary() {
    const last = this.columns.at(-1);
    if (!last) return "No steps yet";
    return `${this.columns.length} steps. ${this.tip({ ...last, segment: null }).join(", ")}.`;
  }
}
