/** Check of the official packages `openai` and `@anthropic-ai/sdk` for Node: streams, tools and structured output. */

import assert from "node:assert";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const { CHAIRLIFT_URL, CHAIRLIFT_SCRIPTED_URL } = process.env;
const City = z.object({ name: z.string(), inhabitants: z.number().int() });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const about = { name: "weather", description: "The weather in a city." };
const question = "How is the weather in Rome?";
const messages = [{ role: "user", content: question }];
const answer = ({ city }) => `Sunny in ${city}, says the sensor chairlift-42.`;

async function checkStructures() {
  const openai = new OpenAI({ baseURL: `${CHAIRLIFT_URL}/v1`, apiKey: "none" });
  const model = "smollm2-135m-instruct";
  const text = { format: zodTextFormat(City, "city") };
  const response = await openai.responses.parse({ model, input: "Describe Paris.", max_output_tokens: 200, text });
  assert.equal(typeof response.output_parsed.inhabitants, "number");
  const response_format = zodResponseFormat(City, "city");
  const chat = await openai.chat.completions.parse({ model, messages, max_tokens: 200, response_format });
  assert.equal(typeof chat.choices[0].message.parsed.inhabitants, "number");
}

async function checkOpenAI() {
  const openai = new OpenAI({ baseURL: `${CHAIRLIFT_SCRIPTED_URL}/v1`, apiKey: "none" });
  const stream = openai.responses.stream({
    model: "scripted",
    input: question,
    tools: [{ type: "function", ...about, parameters, strict: false }],
  });
  let deltas = "";
  stream.on("response.function_call_arguments.delta", (event) => (deltas += event.delta));
  const called = (await stream.finalResponse()).output.find((item) => item.type === "function_call");
  assert.equal(JSON.parse(called.arguments).city, "Rome");
  assert.equal(deltas, called.arguments);
  const tool = { type: "function", function: { ...about, parameters, parse: JSON.parse, function: answer } };
  const runner = openai.chat.completions.runTools({ model: "scripted", stream: true, messages, tools: [tool] });
  assert.match(await runner.finalContent(), /chairlift-42/);
}

async function checkAnthropic() {
  const anthropic = new Anthropic({ baseURL: CHAIRLIFT_SCRIPTED_URL, apiKey: "none" });
  const call = { model: "scripted", max_tokens: 1000, messages };
  const tools = [{ ...about, input_schema: parameters }];
  const message = await anthropic.messages.stream({ ...call, tools }).finalMessage();
  assert.equal(message.stop_reason, "tool_use");
  assert.equal(message.content.find((block) => block.type === "tool_use").input.city, "Rome");
  const tool = betaZodTool({ ...about, inputSchema: z.object({ city: z.string() }), run: answer });
  for (const stream of [false, true]) {
    const final = await anthropic.beta.messages.toolRunner({ ...call, tools: [tool], stream }).runUntilDone();
    assert.match(final.content[0].text, /chairlift-42/);
  }
}

await checkStructures();
await checkOpenAI();
console.log("openai for Node: responses.stream, runTools, structured output");
await checkAnthropic();
console.log("@anthropic-ai/sdk: messages.stream with tools, toolRunner");
