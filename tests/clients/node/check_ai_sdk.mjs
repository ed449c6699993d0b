/** Check of Vercel's AI SDK: tools, streams, objects and embeddings through its four providers. */

import assert from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createOpenResponses } from "@ai-sdk/open-responses";
import { embedMany, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const { CHAIRLIFT_URL, CHAIRLIFT_SCRIPTED_URL } = process.env;
const name = "chairlift";
const apiKey = "none";
const providers = {
  "openai (responses)": (baseURL) => createOpenAI({ baseURL, apiKey }),
  "openai (chat)": (baseURL) => createOpenAI({ baseURL, apiKey }).chat,
  "openai-compatible": (baseURL) => createOpenAICompatible({ name, baseURL, supportsStructuredOutputs: true }),
  "open-responses": (baseURL) => createOpenResponses({ name, url: `${baseURL}/responses`, apiKey }),
  anthropic: (baseURL) => createAnthropic({ baseURL, apiKey }),
};
const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `Sunny in ${city}, says the sensor chairlift-42.`,
});
const question = { role: "user", content: "How is the weather in Rome?" };
const City = z.object({ name: z.string().max(20), inhabitants: z.number().int() });

async function checkTools(title, model) {
  const call = { model, messages: [question], tools: { weather }, stopWhen: stepCountIs(3) };
  const whole = await generateText(call);
  assert.equal(whole.steps.length, 2);
  assert.match(whole.text, /chairlift-42/);
  assert.equal(whole.steps[0].reasoningText?.trim(), title.includes("chat") ? undefined : "A tool can find it.");
  assert.equal(whole.steps[0].text.trim(), "I ask the sensor.");
  await checkSecondTurn(call, whole.responseMessages);
  const stream = streamText(call);
  let text = "";
  for await (const part of stream.fullStream) {
    if (part.type === "error") throw part.error;
    if (part.type === "text-delta") text += part.text;
  }
  assert.match(text, /chairlift-42/);
  const [called] = await stream.steps;
  assert.equal(called.toolCalls[0].input.city, "Rome");
  await checkSecondTurn(call, await stream.responseMessages);
  // The provider open-responses joins the events of the reasoning with those of its summary, which has the same text.
  if (title === "open-responses") return;
  assert.equal(called.reasoningText?.trim(), whole.steps[0].reasoningText?.trim());
}

/** The scripted answer needs the texts of both earlier answers, that before the call included. */
async function checkSecondTurn(call, answers) {
  const messages = [...call.messages, ...answers, { role: "user", content: "And now?" }];
  const { text } = await generateText({ ...call, messages });
  assert.equal(text, "It is still sunny there, says chairlift-42.");
}

for (const [title, provider] of Object.entries(providers)) {
  await checkTools(title, provider(`${CHAIRLIFT_SCRIPTED_URL}/v1`)("scripted"));
  const model = provider(`${CHAIRLIFT_URL}/v1`)("smollm2-135m-instruct");
  const { object } = await generateObject({ model, schema: City, prompt: "Describe Paris.", maxOutputTokens: 200 });
  assert.equal(typeof object.inhabitants, "number");
  console.log(`AI SDK, ${title}: two turns with tools and reasoning, whole and streamed, and generateObject`);
}
for (const create of [createOpenAI, createOpenAICompatible]) {
  const model = create({ name, baseURL: `${CHAIRLIFT_URL}/v1`, apiKey }).embeddingModel("tiny-bert");
  const { embeddings } = await embedMany({ model, values: ["a fox", "a dog"] });
  assert.equal(embeddings.length, 2);
}
console.log("AI SDK: embeddings");
