// @anthropic-ai/sdk: messages, streamed and whole, counted, and the runner of tools.
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic();
const messages = [{ role: "user", content: "What is 1 + 2?" }];
const asked = { model: "policy", max_tokens: 256, messages };
const add = {
  type: "custom",
  name: "add",
  input_schema: { type: "object", properties: { a: { type: "number" }, b: { type: "number" } } },
  parse: (input) => input,
  run: async ({ a, b }) => String(a + b),
};
const cases = {
  create: async () => (await client.messages.create(asked)).content[0].text,
  stream: () => client.messages.stream(asked).finalText(),
  count_tokens: async () => {
    const { input_tokens } = await client.messages.countTokens({ model: "policy", messages });
    return input_tokens > 0 ? cases.create() : "no count";
  },
  tools: async () => (await client.beta.messages.toolRunner({ ...asked, tools: [add] })).content.at(-1).text,
};
console.log(await cases[process.argv[2]]());
