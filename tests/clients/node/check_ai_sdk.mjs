/** Check of Vercel's AI SDK: tools, streams, objects and embeddings through its three providers. */

import assert from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
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
  anthropic: (baseURL) => createAnthropic({ baseURL, apiKey }),
};
const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `Sunny in ${city}, says the sensor chairlift-42.`,
});
const City = z.object({ name: z.string().max(20), inhabitants: z.number().int() });

async function checkTools(model, hasReasoning) {
  const call = { model, prompt: "How is the weather in Rome?", tools: { weather }, stopWhen: stepCountIs(3) };
  const whole = await generateText(call);
  assert.equal(whole.steps.length, 2);
  assert.match(whole.text, /chairlift-42/);
  assert.equal(whole.steps[0].reasoningText?.trim(), hasReasoning ? "A tool can find it." : undefined);
  const stream = streamText(call);
  let text = "";
  for await (const part of stream.fullStream) {
    if (part.type === "error") throw part.error;
    if (part.type === "text-delta") text += part.text;
  }
  assert.match(text, /chairlift-42/);
  const [called] = await stream.steps;
  assert.equal(called.toolCalls[0].input.city, "Rome");
  assert.equal(called.reasoningText?.trim(), whole.steps[0].reasoningText?.trim());
}

for (const [title, provider] of Object.entries(providers)) {
  await checkTools(provider(`${CHAIRLIFT_SCRIPTED_URL}/v1`)("scripted"), !title.includes("chat"));
  const model = provider(`${CHAIRLIFT_URL}/v1`)("smollm2-135m-instruct");
  const { object } = await generateObject({ model, schema: City, prompt: "Describe Paris.", maxOutputTokens: 200 });
  assert.equal(typeof object.inhabitants, "number");
  console.log(`AI SDK, ${title}: tools and reasoning, whole and streamed, and generateObject`);
}
for (const create of [createOpenAI, createOpenAICompatible]) {
  const model = create({ name, baseURL: `${CHAIRLIFT_URL}/v1`, apiKey }).embeddingModel("tiny-bert");
  const { embeddings } = await embedMany({ model, values: ["a fox", "a dog"] });
  assert.equal(embeddings.length, 2);
}
console.log("AI SDK: embeddings");
