// The live view of the engines: figures, steps, blocks, requests.

import { byId, count, make } from "../dom.js";
import { Watcher } from "./events.js";
import { History } from "./history.js";
import { PoolMap } from "./pool.js";
import { RequestList } from "./requests.js";
import { sendSamples } from "./sample.js";
import { Timeline } from "./timeline.js";

const FRAME_MS = 30;  // at least, between frames of moving steps
const SMOOTH_MS = 300;  // over which the steps of an event come in
const IDLE_MS = 1500;  // without an event, while no request is there

export class EngineView {
  /** model: gives the name of the model that samples are sent to. */
  constructor(model) {
    this.model = model;
    this.samples = null;  // the AbortController of those that run
    this.histories = new Map();  // by model
    this.history = new History(null);  // until the first event
    this.highlight = 0;
    this.frame = 0;
    this.drawnAt = 0;
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    const hover = (n) => {
      if (n === this.highlight) return;
      this.highlight = n;
      this.draw();
    };
    this.timeline = new Timeline(byId("timeline"), hover);
    this.pool = new PoolMap(byId("pool"), hover);
    this.requests = new RequestList(byId("requests"), hover);
    this.watcher = new Watcher((event) => this.take(event), (state, words) => this.showState(state, words));
    byId("engine-pause").addEventListener("click", () => this.hold(!this.watcher.held));
    byId("samples").addEventListener("click", () => this.toggleSamples());
    document.addEventListener("theme", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(byId("engine"));
  }

  setShown(shown) {
    this.shown = shown;
    this.watcher.setShown(shown);
    if (shown) this.draw();
  }

  hold(held) {
    this.watcher.setHeld(held);
    const button = byId("engine-pause");
    const label = held ? "Go on" : "Hold the view";
    button.setAttribute("aria-pressed", String(held));
    button.setAttribute("aria-label", label);
    button.title = label;
    button.querySelector("use").setAttribute("href", held ? "#i-play" : "#i-pause");
  }

  /** Send a load to look at, or end the one that runs. */
  async toggleSamples() {
    if (this.samples) {
      this.samples.abort();
      return;
    }
    const button = byId("samples");
    const label = button.textContent;
    this.samples = new AbortController();
    button.textContent = "End the sample requests";
    try {
      await sendSamples(this.model(), this.samples.signal);
    } catch (error) {
      if (error.name !== "AbortError") byId("engine-state").textContent = error.message;
      this.samples.abort();
    }
    this.samples = null;
    button.textContent = label;
  }

  showState(state, words) {
    byId("engine-state").textContent = words;
    byId("engine").dataset.state = state;
  }

  take(event) {
    let history = this.histories.get(event.model);
    if (!history) {
      history = new History(event.model);
      this.histories.set(event.model, history);
      this.drawModels();
    }
    history.take(event);
    clearTimeout(history.timer);
    if (!event.requests.length) {
      history.timer = setTimeout(() => {
        history.idle = true;
        if (history === this.history) this.drawFigures();
      }, IDLE_MS);
    }
    if (this.history.model === null) this.choose(history);
    if (history !== this.history) {
      history.advance(Infinity);
      return;
    }
    if (this.calm.matches || history.coming.length === 0) history.advance(Infinity);
    this.drawFigures();
    this.drawSlow();
    this.step();
  }

  choose(history) {
    this.history = history;
    history.advance(Infinity);
    this.drawModels();
    this.draw();
  }

  /** With several models, a button for each. */
  drawModels() {
    const all = [...this.histories.values()];
    byId("engine-models").replaceChildren(...(all.length < 2 ? [] : all.map((history) =>
      make("button", {
        type: "button", "aria-pressed": String(history === this.history), onclick: () => this.choose(history),
      }, history.model))));
  }

  /** Let the steps that came move in, some in each frame. */
  step() {
    const { history } = this;
    if (!history.coming.length) {
      this.timeline.draw(history, this.highlight);
      return;
    }
    if (this.frame) return;
    this.drawnAt = performance.now();
    let owed = 0;
    const move = (now) => {
      if (now - this.drawnAt < FRAME_MS) {
        this.frame = requestAnimationFrame(move);
        return;
      }
      const rate = Math.max(this.history.coming.length, 8) / SMOOTH_MS;
      owed += rate * Math.max(now - this.drawnAt, 0);
      this.drawnAt = now;
      const whole = Math.floor(owed);
      owed -= whole;
      if (whole) {
        this.history.advance(whole);
        this.timeline.draw(this.history, this.highlight);
      }
      this.frame = this.history.coming.length ? requestAnimationFrame(move) : 0;
    };
    this.frame = requestAnimationFrame(move);
  }

  draw() {
    if (!this.shown) return;
    this.drawFigures();
    this.drawSlow();
    this.timeline.draw(this.history, this.highlight);
  }

  drawSlow() {
    const { history } = this;
    this.pool.draw(history, this.highlight);
    this.drawLegend();
    const { running, waiting, hidden } = this.requests.draw(history, this.highlight);
    byId("requests-size").textContent = running + waiting
      ? `${running} running, ${waiting} waiting${hidden ? `, ${hidden} not shown` : ""}`
      : "";
    byId("no-requests").hidden = running + waiting > 0;
  }

  drawLegend() {
    const { blocks } = this.history;
    if (!blocks) return;
    const cell = blocks.per_cell > 1 ? `; ${blocks.per_cell} in a cell` : "";
    byId("pool-size").textContent = `${count(blocks.total)}, each of ${blocks.size} tokens${cell}`;
    const names = { owned: "of one request", shared: "shared", cached: "cached", free: "free" };
    byId("legend").replaceChildren(...this.pool.totals().map(([kind, n]) =>
      make("li", {}, make("i", { class: `cell ${kind}` }), `${names[kind]} `, make("b", {}, count(n)), blocks.per_cell > 1 ? " cells" : "")));
  }

  drawFigures() {
    const { metrics: m } = this.history;
    const rates = this.history.rates();
    const queried = m.prefix_cache_queried_tokens;
    const figures = [
      ["Generated", count(rates.decode), "tok/s", "Tokens of answers a second, over the last 3 seconds"],
      ["Prompts", count(rates.prefill), "tok/s", "Tokens of prompts computed a second, over the last 3 seconds"],
      ["Step", rates.ms === null ? "–" : rates.ms.toFixed(1), "ms", "Median time of a step, over the last 3 seconds"],
      ["Cache hits", queried ? ((100 * m.prefix_cache_hit_tokens) / queried).toFixed(0) : "–", "%",
        "Share of all prompt tokens since the start that were found in the cache"],
      ["Blocks used", m.blocks_total ? ((100 * m.blocks_owned) / m.blocks_total).toFixed(0) : "–", "%",
        "Share of the pool that requests own"],
      ["Preempted", count(m.preemptions ?? 0), "×", "Requests that gave their blocks away to others, since the start"],
    ];
    byId("figures").replaceChildren(...figures.map(([name, value, unit, title]) =>
      make("div", { title }, make("dt", {}, name), make("dd", {}, value, make("span", {}, unit)))));
  }
}
