// Shows the steps of an event one after another, some in each frame.

const FRAME_MS = 30;  // at least, between frames of moving steps
const SMOOTH_MS = 300;  // over which the steps of an event come in

export class Motion {
  /** history: gives the history that is shown.  draw: called after steps were added to it. */
  constructor(history, draw) {
    this.history = history;
    this.draw = draw;
    this.frame = 0;
  }

  /** Move until no steps are left to come. */
  start() {
    if (this.frame) return;
    let drawnAt = performance.now();
    let owed = 0;
    const move = (now) => {
      const history = this.history();
      if (now - drawnAt >= FRAME_MS) {
        owed += (Math.max(history.coming.length, 8) / SMOOTH_MS) * (now - drawnAt);
        drawnAt = now;
        const whole = Math.floor(owed);
        owed -= whole;
        if (whole) {
          history.advance(whole);
          this.draw();
        }
      }
      this.frame = history.coming.length ? requestAnimationFrame(move) : 0;
    };
    this.frame = requestAnimationFrame(move);
  }
}
