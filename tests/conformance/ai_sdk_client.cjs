// What Vercel's AI SDK makes of a server: a tool is called and answered, whole and streamed. node ai_sdk_client.cjs URL MODEL

const { createOpenAI } = require("@ai-sdk/openai");
const { generateText, stepCountIs, streamText, tool } = require("ai");
const { z } = require("zod");
const sdk = require("ai/package.json");

const [url, name] = process.argv.slice(2);
const cities = [];
const weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => {
    cities.push(city);
    return `rain in ${city}`;
  },
});

async function main() {
  const provider = createOpenAI({ baseURL: url, apiKey: "none" });
  const asked = { prompt: "What is the weather in Bern?", tools: { weather }, stopWhen: stepCountIs(3), maxRetries: 0 };
  const whole = await generateText({ ...asked, model: provider.chat(name), maxOutputTokens: 60 });
  const streamed = streamText({ ...asked, model: provider.chat(name), maxOutputTokens: 60 });
  const of_responses = await generateText({ ...asked, model: provider.responses(name), maxOutputTokens: 60 });
  const answers = [whole.text, await streamed.text, of_responses.text];
  console.log(JSON.stringify({ version: sdk.version, answers, cities }));
}

main();
