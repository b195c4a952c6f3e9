// The map of the block pool: a cell for each block (or a few), in the order of their numbers.

import { count } from "../dom.js";
import { fit, showTips } from "./canvas.js";
import { palette } from "./colours.js";

// Codes of cells; a positive code is the number of the request that alone owns the cell's blocks.
const SHARED = -2;
const KINDS = { 0: "free", [-1]: "cached", [SHARED]: "shared" };
const SIZES = [18, 16, 14, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3];

export class PoolMap {
  /** hover(n): a request is pointed at; 0: none. */
  constructor(canvas, hover) {
    this.canvas = canvas;
    this.cells = [];
    showTips(canvas, (x, y) => {
      const i = this.at(x, y);
      const code = this.cells[i];
      hover(code > 0 ? code : 0);
      return code === undefined ? null : this.tip(i, code);
    }, () => hover(0));
  }

  draw(history, highlight) {
    const { blocks } = history;
    this.history = history;
    this.cells = blocks ? blocks.runs.flatMap(([code, n]) => new Array(n).fill(code)) : [];
    const width = this.canvas.clientWidth;
    const number = this.cells.length;
    const highest = parseFloat(getComputedStyle(this.canvas).maxHeight);
    this.size = SIZES.find((s) => Math.ceil(number / Math.floor(width / s)) * s <= highest) ?? 3;
    this.columns = Math.max(1, Math.floor(width / this.size));
    const rows = Math.max(1, Math.ceil(number / this.columns));
    const context = fit(this.canvas, rows * this.size);
    const colours = palette();
    const inner = this.size - (this.size > 4 ? 1.5 : 0.5);
    const round = this.size >= 9 ? 2.5 : 0;
    const place = (i) => [(i % this.columns) * this.size, Math.floor(i / this.columns) * this.size];
    for (const [code, indices] of this.byCode()) {  // since a change of colour is slow
      const faint = highlight && code !== highlight ? 0.22 : 1;
      context.fillStyle = code > 0 ? colours.request(code, faint) : colours[KINDS[code]];
      context.beginPath();
      for (const i of indices) {
        const [x, y] = place(i);
        if (round) context.roundRect(x, y, inner, inner, round);
        else context.rect(x, y, inner, inner);
      }
      context.fill();
      if (code === SHARED && inner >= 4) {  // a dot, so that shared blocks differ without colour
        const dot = Math.max(2, inner / 3);
        const edge = (inner - dot) / 2;
        context.fillStyle = colours.back;
        context.beginPath();
        for (const i of indices) {
          const [x, y] = place(i);
          context.roundRect(x + edge, y + edge, dot, dot, dot / 2);
        }
        context.fill();
      }
    }
    const totals = Object.entries(blocks?.counts ?? {}).map(([name, n]) => `${count(n)} ${name}`);
    this.canvas.setAttribute("aria-label", blocks ? `${count(blocks.total)} blocks: ${totals.join(", ")}.` : "No blocks yet");
  }

  byCode() {
    const found = new Map();
    this.cells.forEach((code, i) => {
      if (!found.has(code)) found.set(code, []);
      found.get(code).push(i);
    });
    return found;
  }

  at(x, y) {
    const column = Math.floor(x / this.size);
    return column < this.columns ? Math.floor(y / this.size) * this.columns + column : -1;
  }

  tip(i, code) {
    const { per_cell: perCell, mapped, size } = this.history.blocks;
    const first = i * perCell;
    const last = Math.min(first + perCell, mapped) - 1;
    const where = first === last ? `Block ${count(first)}` : `Blocks ${count(first)} to ${count(last)}`;
    const request = this.history.known.get(code);
    return [
      `${where}: ${code > 0 ? `request ${code} alone` : KINDS[code]}`,
      request ? `${count(request.prompt)} tokens in, ${count(request.generated)} out` : `room for ${count(size * (last - first + 1))} tokens`,
    ];
  }
}
