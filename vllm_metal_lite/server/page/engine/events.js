// Watches GET /events while the view is seen: not when the tab is hidden or the panel is closed.

import { events, request } from "../api.js";

const WAITS = [1, 2, 4, 8];  // seconds before another attempt

export class Watcher {
  /** receive: gets the name and the value of each event.  state: gets "watching", "paused", "trying" or "none", and a notice. */
  constructor(receive, state) {
    this.receive = receive;
    this.state = state;
    this.shown = false;
    this.paused = false;
    this.stopper = null;
    document.addEventListener("visibilitychange", () => this.check());
    document.addEventListener("key", () => {
      this.end();
      this.check();
    });
  }

  setShown(shown) {
    this.shown = shown;
    this.check();
  }

  setPaused(paused) {
    this.paused = paused;
    this.check();
  }

  check() {
    const watch = this.shown && !this.paused && !document.hidden;
    if (!watch) {
      this.end();
      if (this.paused) this.state("paused", "Paused");
    } else if (!this.stopper) {
      this.stopper = new AbortController();
      this.watch(this.stopper.signal);
    }
  }

  end() {
    this.stopper?.abort();
    this.stopper = null;
  }

  async watch(signal) {
    for (let failed = 0; !signal.aborted; ) {
      let notice = "The event stream has ended.";
      try {
        const response = await request("/events", { signal, asks: false });
        this.state("watching", "");
        for await (const { event, data } of events(response)) {
          if (signal.aborted) return;
          failed = 0;
          this.receive(event, JSON.parse(data));
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 404 || error.status === 401) {
          this.state("none", error.status === 404 ? "This server does not offer a view of its engine." : error.message);
          return;
        }
        notice = error.message;
      }
      const wait = WAITS[Math.min(failed++, WAITS.length - 1)];
      this.state("trying", `${notice} Trying again.`);
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, 1000 * wait);
        signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
      });
    }
  }
}
