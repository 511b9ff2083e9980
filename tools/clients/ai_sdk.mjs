// The AI SDK with its OpenAI-compatible and its OpenAI provider, which asks /v1/responses.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const own = { baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY };
const providers = { compatible: createOpenAICompatible({ name: "asyncrl", ...own }), openai: createOpenAI(own) };
const [provider, name] = process.argv[2].split(".");
const asked = { model: providers[provider]("policy"), prompt: "What is 1 + 2?" };
const add = tool({
  description: "Add two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => String(a + b),
});
const tools = { tools: { add }, stopWhen: stepCountIs(5) };
const cases = {
  generateText: async () => (await generateText(asked)).text,
  tools: async () => (await generateText({ ...asked, ...tools })).text,
  streamText: () => streamText({ ...asked, ...tools }).text,
  generateObject: async () => (await generateObject({ ...asked, schema: z.object({ text: z.string() }) })).object.text,
};
console.log(await cases[name]());
