// dependencies: ai@7.0.173 @ai-sdk/openai-compatible@3.0.92 @ai-sdk/openai@4.0.118 zod@4
// The AI SDK: chat completions and the Responses API.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = `${process.argv[2]}/v1`;
const [HELLO, NEWS, WEATHER] = ["Hello there.", "It is sunny in Lisbon.", "What is the weather in Lisbon?"];
const LISBON = { city: "Lisbon", degrees: 21 };
const compatible = createOpenAICompatible({
  name: "x", baseURL, includeUsage: true, supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL, apiKey: "-" });
const get_weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `sunny in ${city}`,
});
const output = Output.object({ schema: z.object({ city: z.string(), degrees: z.number().int() }) });
for (const model of [compatible("demo"), openai.chat("demo"), openai.responses("demo")]) {
  const hello = streamText({ model, system: "Be kind.", prompt: "hi" });
  assert.equal(await hello.text, HELLO);
  assert.ok((await hello.usage).outputTokens > 0);
  const how = { model, tools: { get_weather }, stopWhen: stepCountIs(3), prompt: WEATHER };
  assert.equal((await generateText(how)).text, NEWS);
  assert.equal(await streamText(how).text, NEWS);
  assert.deepEqual((await generateText({ model, output, prompt: "Lisbon?" })).output, LISBON);
}
for (const model of [compatible.embeddingModel("demo"), openai.embeddingModel("demo")]) {
  const { embeddings } = await embedMany({ model, values: ["A dog", "Once"] });
  assert.ok(Math.abs(Math.hypot(...embeddings[1]) - 1) < 1e-3);
}
