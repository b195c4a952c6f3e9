// The state of one engine, from its events: steps, requests, blocks and rates.

import { count } from "../dom.js";

const KEPT = 400;  // steps
const SILENT_MS = 1500;  // longer than any two events are apart while steps are short
const SECONDS = 3;  // over which rates are taken

export class History {
  constructor(model) {
    this.model = model;
    this.steps = [];  // {number, t, ms, decodes, segments}, those that are shown
    this.coming = [];  // later ones, which Motion shows
    this.requests = [];
    this.known = new Map();  // requests as they were last told of, by number
    this.blocks = null;
    this.metrics = {};
    this.counts = [];  // {time, decode, prefill}: the engine's counts of tokens, in the last seconds
    this.preemptions = new Map();  // by number: when it was last seen preempted
    this.time = 0;
    this.numSteps = 0;
    this.idle = false;  // nothing has run for a while
    this.eventAt = 0;  // when the last event came, by this page's clock
    this.state = "loaded";  // of the model, as the server says
    this.notice = "";  // why no steps come; "": they do
    this.numUnfinished = null;  // requests, by the server's count; null: the engine's own count is new
  }

  addEvent(event) {
    if (event.time < this.time || event.num_steps < this.numSteps) this.restart();
    const first = event.num_steps - event.steps.length + 1;
    event.steps.forEach((step, i) => {
      // A stream that begins anew repeats its latest event.
      if (first + i > this.numSteps) this.coming.push({ ...step, number: first + i });
    });
    this.coming.splice(0, this.coming.length - KEPT);
    this.count(event);
    Object.assign(this, { time: event.time, numSteps: event.num_steps, requests: event.requests });
    Object.assign(this, { idle: false, eventAt: performance.now(), notice: "", numUnfinished: null });
    this.blocks = event.blocks ?? this.blocks;
    this.metrics = event.metrics;
    for (const request of event.requests) {
      this.known.delete(request.n);
      this.known.set(request.n, request);
    }
    for (const n of this.known.keys()) {
      if (this.known.size <= 1000) break;
      this.known.delete(n);
    }
    for (const n of event.preempted) this.preemptions.set(n, event.time);
  }

  /** Remember how many tokens were computed until an event. */
  count({ time, steps, metrics }) {
    // After an idle time, rates count from the first step.
    if (this.counts.length && !this.requests.length) this.counts = [{ ...this.counts.at(-1), time: steps[0]?.t ?? time }];
    this.counts.push({ time, decode: metrics.decode_tokens, prefill: metrics.prefill_tokens });
    while (this.counts.length > 2 && this.counts[1].time <= time - SECONDS) this.counts.shift();
  }

  /** Set the state that the server reports for the model; true: its engine is silent or gone. */
  setState({ model, state, error, requests }) {
    const waits = requests ? ` ${count(requests)} ${requests === 1 ? "request is" : "requests are"} waiting.` : "";
    this.state = state;
    this.notice = "";
    if (state !== "loaded") {
      if (this.blocks) this.restart();
      this.notice = {
        loading: `${model} is being loaded.${waits}`,
        failed: `${model} is not running: ${error}. The next request starts it again.`,
        unloaded: `${model} is not loaded. The next request loads it.`,
      }[state];
      return true;
    }
    const silent = performance.now() - this.eventAt;
    this.numUnfinished = null;
    if (!requests || !this.eventAt || silent < SILENT_MS) return false;
    this.notice = `No news for ${Math.round(silent / 1000)} s: a long step is running. The view shows the state before it.`;
    this.numUnfinished = requests;
    return true;
  }

  /** The engine's process began anew, or has ended. */
  restart() {
    Object.assign(this, { steps: [], coming: [], requests: [], blocks: null, metrics: {}, counts: [] });
    this.known.clear();
    this.preemptions.clear();
    this.time = this.numSteps = 0;
  }

  /** Show the next `n` of the steps that came. */
  advance(n) {
    this.steps.push(...this.coming.splice(0, n));
    this.steps.splice(0, this.steps.length - KEPT);
  }

  /** Tokens a second of the last seconds, generated and of prompts; 0 when nothing runs. */
  rates() {
    const all = this.idle ? [] : [...this.steps, ...this.coming];
    const recent = all.filter((step) => step.t > this.time - SECONDS);
    const ms = recent.map((step) => step.ms).sort((a, b) => a - b);
    const [first, last] = [this.counts[0], this.counts.at(-1)];
    const rate = (name) => (this.idle || !last ? 0 : (last[name] - first[name]) / Math.max(last.time - first.time, 0.25));
    return { decode: rate("decode"), prefill: rate("prefill"), ms: ms[ms.length >> 1] ?? null };
  }
}
