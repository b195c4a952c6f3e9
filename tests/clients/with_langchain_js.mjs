// dependencies: @langchain/openai@1.6.0 @langchain/core@1
// LangChain for JavaScript.
import assert from "node:assert/strict";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { z } from "zod";

const own = { model: "demo", apiKey: "-", configuration: { baseURL: `${process.argv[2]}/v1` } };
const model = new ChatOpenAI(own);
assert.equal((await model.invoke("hi")).content, "Hello there.");
let text = "";
for await (const chunk of await model.stream("hi")) text += chunk.content;
assert.equal(text, "Hello there.");
const City = z.object({ city: z.string(), degrees: z.number().int() });
for (const method of ["jsonSchema", "functionCalling"]) {
  const found = await model.withStructuredOutput(City, { method, name: "City" }).invoke("Lisbon?");
  assert.deepEqual(found, { city: "Lisbon", degrees: 21 });
}
const weather = tool(({ city }) => `sunny in ${city}`, {
  name: "get_weather", description: "The weather.", schema: z.object({ city: z.string() }),
});
const asked = [{ role: "user", content: "What is the weather in Lisbon?" }];
const bound = model.bindTools([weather]);
const call = await bound.invoke(asked);
const result = await weather.invoke(call.tool_calls[0]);
assert.equal((await bound.invoke([...asked, call, result])).content, "It is sunny in Lisbon.");
const [vector] = await new OpenAIEmbeddings(own).embedDocuments(["Once"]);
assert.ok(Math.abs(Math.hypot(...vector) - 1) < 1e-3);
