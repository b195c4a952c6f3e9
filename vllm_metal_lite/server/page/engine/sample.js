// A load to look at: requests of different lengths, some of which begin alike.

import { events, request } from "../api.js";

const NUMBER = 16;
const SHARED = "You answer questions about these notes. " + Array.from(
  { length: 24 }, (_, i) => `The code of box ${i + 1} is ${1000 + 37 * i}.`,
).join(" ");
const NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Grace", "Hugo"];
const PLACES = ["station", "market", "river", "school", "harbour"];

function bodyOf(i, model) {
  const story = Array.from(
    { length: [0, 2, 6, 15, 30][i % 5] },
    (_, j) => `On day ${j + 1}, ${NAMES[(i + j) % NAMES.length]} went to the ${PLACES[(i * j + i) % PLACES.length]}.`,
  );
  const messages = [{ role: "user", content: [...story, `What is the code of box ${i + 1}?`].join(" ") }];
  if (i % 3 === 0) messages.unshift({ role: "system", content: SHARED });
  return { model, messages, stream: true, ignore_eos: true, max_tokens: 40 + 23 * ((i * 5) % 9) };
}

/** Send the requests; resolves when all have ended, or `signal` has ended them. */
export async function sendSamples(model, signal) {
  await Promise.all(Array.from({ length: NUMBER }, async (_, i) => {
    const response = await request("/v1/chat/completions", { body: bodyOf(i, model), signal });
    for await (const event of events(response)) void event;
  }));
}
