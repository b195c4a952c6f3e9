// A load to look at: requests of different lengths, some of which begin alike.

import { events, request } from "../api.js";

// Browsers open six connections to a server, so a connection carries several prompts.
const LENGTHS = [50, 110, 190];  // tokens of the answers, one connection each
const STORIES = [0, 2, 5, 10, 20, 34];  // sentences of the prompts
const NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Grace", "Hugo"];
const PLACES = ["station", "market", "river", "school", "harbour"];
const SHARED = Array.from({ length: 30 }, (_, i) => `The code of box ${i + 1} is ${1000 + 37 * i}.`).join(" ");

function prompt(connection, i) {
  const n = connection * STORIES.length + i;
  const story = Array.from(
    { length: STORIES[i] },
    (_, j) => `On day ${j + 1}, ${NAMES[(n + j) % NAMES.length]} went to the ${PLACES[(n * j + n) % PLACES.length]}.`,
  );
  const begin = n % 3 === 0 ? [SHARED] : [];
  return [...begin, ...story, `Now tell story number ${n + 1}:`].join(" ");
}

/** Send the requests; resolves when all have ended, or `signal` has ended them. */
async function sendSamples(model, signal) {
  await Promise.all(LENGTHS.map(async (max_tokens, connection) => {
    const prompts = STORIES.map((_, i) => prompt(connection, i));
    const body = { model, prompt: prompts, stream: true, ignore_eos: true, max_tokens };
    const response = await request("/v1/completions", { body, signal });
    for await (const event of events(response)) void event;
  }));
}

/** A button that sends samples, or stops those that run. */
export class SampleButton {
  /** model: gives the name of the model that answers.  ended: called when the samples have ended. */
  constructor(button, model, ended) {
    this.button = button;
    this.model = model;
    this.ended = ended;
    this.running = null;  // the AbortController of those that run
    this.refusal = "";  // why the last samples were not answered
    button.addEventListener("click", () => (this.running ? this.running.abort() : this.send()));
  }

  async send() {
    const label = this.button.textContent;
    this.running = new AbortController();
    this.refusal = "";
    this.button.textContent = "Stop samples";
    try {
      await sendSamples(this.model(), this.running.signal);
    } catch (error) {
      if (error.name !== "AbortError") this.refusal = error.message;
      this.running.abort();
    }
    this.running = null;
    this.button.textContent = label;
    this.ended();
  }
}
