// Vercel's AI SDK with its default settings and one tool. Run by node with the folder of `clients_env.py`.
//
//     node clients_run.mjs FOLDER openai|anthropic whole|streamed      asks until no tool is called, prints the answer
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, provider, way] = process.argv.slice(2);
const require = createRequire(pathToFileURL(`${folder}/package.json`));
const { generateText, stepCountIs, streamText, tool } = require("ai");
const { z } = require("zod");
const models = {
  openai: () => require("@ai-sdk/openai").openai("gpt-5"),
  anthropic: () => require("@ai-sdk/anthropic").anthropic("claude-sonnet-4-5"),
};

const add = tool({
  description: "Add two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => {
    if (a < 0) throw new Error("a is negative");
    return a + b;
  },
});
const asked = {
  model: models[provider](),
  system: "Add with the tool.",
  prompt: "add some numbers",
  tools: { add },
  stopWhen: stepCountIs(9),
};
console.log(way === "streamed" ? await streamText(asked).text : (await generateText(asked)).text);
