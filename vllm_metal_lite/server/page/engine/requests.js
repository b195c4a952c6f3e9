// The queue: requests that run, then those that wait.

import { count, make, place } from "../dom.js";
import { palette } from "./colours.js";

const MAX_ROWS = 60;
const FRESH = 2;  // seconds for which a preemption is marked

export class RequestList {
  /** hover(n): a request is pointed at; 0: none. */
  constructor(list, hover) {
    this.list = list;
    this.rows = new Map();
    // The list listens: a row that is removed under the pointer gets no event.
    list.addEventListener("pointerover", (event) => hover(Number(event.target.closest("li")?.dataset.number ?? 0)));
    list.addEventListener("pointerleave", () => hover(0));
  }

  draw(history, highlight) {
    const colours = palette();
    const running = history.requests.filter((r) => r.state === "running");
    const waiting = history.requests.filter((r) => r.state !== "running");
    const shown = [...running, ...waiting].slice(0, MAX_ROWS);
    const longest = Math.max(1, ...shown.map((r) => r.prompt + r.generated));
    const kept = new Set(shown.map((r) => r.n));
    for (const n of this.rows.keys()) if (!kept.has(n)) this.rows.delete(n);
    place(this.list, shown.map((request) => {
      const row = this.rows.get(request.n) ?? this.row(request);
      this.fill(row, request, longest, colours, history);
      row.element.classList.toggle("dim", Boolean(highlight) && highlight !== request.n);
      return row.element;
    }));
    return shown.length;
  }

  row(request) {
    const bar = (kind) => make("span", { class: kind });
    const row = {
      number: make("span", { class: "number" }, String(request.n)),
      bars: [bar("cached"), bar("chunk"), bar("open"), bar("solid")],
      words: make("span", { class: "words" }),
      state: make("span", { class: "state" }),
    };
    row.element = make(
      "li",
      { title: request.id, "data-number": String(request.n) },
      row.number, make("span", { class: "bar", "aria-hidden": "true" }, ...row.bars), row.words, row.state,
    );
    this.rows.set(request.n, row);
    return row;
  }

  fill(row, request, longest, colours, history) {
    const { prompt, generated, state, preempted } = request;
    // Of a preempted request, what it generated is computed again after the prompt.
    const done = Math.min(request.computed, prompt);
    const cached = Math.min(request.cached, done);
    const widths = [cached, done - cached, prompt - done, generated];
    row.element.style.setProperty("--colour", colours.request(request.n));
    row.bars.forEach((bar, i) => {
      bar.style.width = `${(100 * widths[i]) / longest}%`;
    });
    const parts = [
      done < prompt ? `${count(done)} of ${count(prompt)} in` : `${count(prompt)} in`,
      `${count(generated)} out`,
    ];
    row.words.textContent = parts.join(" · ");
    const fresh = history.time - (history.preemptions.get(request.n) ?? -Infinity) < FRESH;
    row.element.classList.toggle("preempted", fresh);
    row.element.classList.toggle("queued", state !== "running");
    const what = state !== "running" ? "waits" : done < prompt ? "prompt" : "answers";
    row.state.textContent = preempted ? `${what}, preempted ${preempted}×` : what;
    row.state.title = row.state.textContent;
  }
}
