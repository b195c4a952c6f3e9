// The live view of the engines: figures, steps, blocks, requests.

import { byId, count, duration, make } from "../dom.js";
import { keepSetting, setting } from "../store.js";
import { Watcher } from "./events.js";
import { History } from "./history.js";
import { Motion } from "./motion.js";
import { PoolMap } from "./pool.js";
import { RequestList } from "./requests.js";
import { SampleButton } from "./samples.js";
import { Timeline } from "./timeline.js";

const IDLE_MS = 1500;  // after the last event, if no request is left: rates become 0

export class EngineView {
  /** model: gives the name of the model that samples are sent to. */
  constructor(model) {
    this.histories = new Map();  // by model
    this.history = new History(null);  // until the first event
    this.highlight = 0;
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    const hover = (n) => {
      if (n === this.highlight) return;
      this.highlight = n;
      this.draw();
    };
    this.timeline = new Timeline(byId("timeline"), hover);
    this.pool = new PoolMap(byId("pool"), hover);
    this.requests = new RequestList(byId("requests"), hover);
    this.watcher = new Watcher(
      (name, value) => (name === "models" ? this.setStates(value) : this.addEvent(value)),
      (state, notice) => {
        byId("engine").dataset.state = state;
        this.notice = notice;
        this.drawNotice();
      },
    );
    this.samples = new SampleButton(byId("samples"), model, () => this.drawNotice());
    this.motion = new Motion(() => this.history, () => this.timeline.draw(this.history, this.highlight));
    this.explain(setting("explain", innerHeight >= 900));
    byId("engine-explain").addEventListener("click", () => {
      const explained = !byId("engine").classList.contains("explained");
      keepSetting("explain", explained);
      this.explain(explained);
    });
    byId("engine-pause").addEventListener("click", () => this.pause(!this.watcher.paused));
    document.addEventListener("theme", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(byId("engine"));
  }

  setShown(shown) {
    this.shown = shown;
    this.watcher.setShown(shown);
    if (shown) this.draw();
  }

  pause(paused) {
    this.watcher.setPaused(paused);
    byId("engine-pause").setAttribute("aria-pressed", String(paused));
  }

  /** Show or hide the paragraphs that explain the view. */
  explain(shown) {
    byId("engine").classList.toggle("explained", shown);
    byId("engine-explain").setAttribute("aria-pressed", String(shown));
  }

  /** Show one notice: the connection's, else the engine's, else why samples were refused. */
  drawNotice() {
    const notice = this.notice || this.history.notice || this.samples.refusal;
    byId("engine").dataset.model = this.history.state;
    if (byId("engine-state").textContent !== notice) byId("engine-state").textContent = notice;
  }

  /** The server's report of its models. */
  setStates(states) {
    for (const state of states) {
      const known = this.histories.get(state.model);
      if (!known && state.state === "unloaded") continue;
      const history = known ?? this.add(state.model);
      const changed = history.setState(state);
      if (this.history.model === null) this.choose(history);
      else if (changed && history === this.history) this.draw();
    }
    this.drawNotice();
  }

  add(model) {
    const history = new History(model);
    this.histories.set(model, history);
    this.drawModels();
    return history;
  }

  addEvent(event) {
    const history = this.histories.get(event.model) ?? this.add(event.model);
    history.addEvent(event);
    this.drawNotice();
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
    if (this.calm.matches) history.advance(Infinity);
    this.drawFigures();
    this.drawSlow();
    if (history.coming.length) this.motion.start();
    else this.timeline.draw(history, this.highlight);
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
    const numShown = this.requests.draw(history, this.highlight);
    const { requests_running: running = 0, requests_waiting: waiting = 0 } = history.metrics;
    const hidden = running + waiting - numShown;
    const numbers = history.numUnfinished !== null
      ? `${count(history.numUnfinished)} unfinished`
      : `${count(running)} running, ${count(waiting)} waiting${hidden > 0 ? `, ${count(hidden)} not shown` : ""}`;
    const none = history.numUnfinished === null && running + waiting === 0;
    byId("requests-size").textContent = none ? "" : numbers;
    byId("no-requests").hidden = !none;
  }

  drawLegend() {
    const { blocks } = this.history;
    const rest = blocks && blocks.total > blocks.mapped ? `, all free from ${count(blocks.mapped)} on` : "";
    byId("pool-size").textContent = blocks ? `${count(blocks.total)} of ${blocks.size} tokens${rest}` : "";
    byId("legend").replaceChildren(...Object.entries(blocks?.counts ?? {}).map(([kind, n]) =>
      make("li", {}, make("i", { class: `cell ${kind}` }), `${kind === "owned" ? "of one request" : kind} `, make("b", {}, count(n)))));
  }

  drawFigures() {
    const { metrics: m } = this.history;
    const rates = this.history.rates();
    const queried = m.prefix_cache_queried_tokens;
    const current = this.history.numUnfinished === null && m.blocks_total;
    const share = (part, all) => (all ? `${((100 * part) / all).toFixed(0)} %` : "–");
    const figures = {
      generated: current ? `${count(rates.decode)} tok/s` : "–",
      prompts: current ? `${count(rates.prefill)} tok/s` : "–",
      step: current && rates.ms !== null ? duration(rates.ms) : "–",
      hits: share(m.prefix_cache_hit_tokens, queried),
      used: share(m.blocks_owned, m.blocks_total),
      preempted: m.blocks_total ? count(m.preemptions) : "–",
      drafts: `${share(m.accepted_tokens, m.draft_tokens)} accepted`,
    };
    for (const [name, figure] of Object.entries(figures)) {
      const [value, ...unit] = figure.split(" ");
      byId(`figure-${name}`).replaceChildren(value, make("span", {}, unit.join(" ")));
    }
    byId("figure-drafts").parentElement.hidden = !m.draft_tokens;
  }
}
