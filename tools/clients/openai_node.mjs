// openai for Node: chat completions, its helpers, and responses.
import OpenAI from "openai";

const client = new OpenAI();
const parameters = { type: "object", properties: { a: { type: "number" }, b: { type: "number" } } };
const input = [{ role: "user", content: "What is 1 + 2?" }];
const asked = { model: "policy", messages: input };
const add = { name: "add", description: "Add.", parameters, parse: JSON.parse, function: ({ a, b }) => String(a + b) };

async function respond(ask) {
  for (;;) {
    const answer = await ask({ model: "policy", input, tools: [{ type: "function", name: "add", parameters }] });
    const calls = answer.output.filter((item) => item.type === "function_call");
    if (!calls.length) return answer.output_text;
    const replies = calls.map((call) => ({ type: "function_call_output", call_id: call.call_id, output: "3" }));
    input.push(...answer.output, ...replies);
  }
}

const cases = {
  chat: async () => (await client.chat.completions.create(asked)).choices[0].message.content,
  stream: () => client.chat.completions.stream(asked).finalContent(),
  runTools: () => client.chat.completions.runTools({ ...asked, tools: [{ type: "function", function: add }] }).finalContent(),
  responses: () => respond((body) => client.responses.create(body)),
  "responses.stream": () => respond((body) => client.responses.stream(body).finalResponse()),
};
console.log(await cases[process.argv[2]]());
