// What the openai package for Node gets from a server, as JSON. node node_client.cjs URL MODEL

const { OpenAI } = require("openai");
const { VERSION } = require("openai/version");

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const completion = { model, prompt: "Once upon a time", max_tokens: 12, seed: 1 };
const chat = { model, messages: [{ role: "user", content: "Tell me of a fox." }], max_completion_tokens: 12, seed: 1 };

async function all(stream) {
  const chunks = [];
  for await (const chunk of await stream) chunks.push(chunk);
  return chunks;
}

async function failure(promise) {
  try {
    return { name: null, answer: await promise };
  } catch (error) {
    const { status, code, param, type, requestID } = error;
    return { name: error.constructor.name, status, code, param, type, requestID };
  }
}

async function main() {
  const streamed = { stream: true, stream_options: { include_usage: true } };
  console.log(JSON.stringify({
    version: VERSION,
    models: (await client.models.list()).data.map(({ id }) => id),
    model: (await client.models.retrieve(model)).id,
    completion: await client.completions.create(completion),
    completionChunks: await all(client.completions.create({ ...completion, ...streamed })),
    chat: await client.chat.completions.create(chat),
    chatChunks: await all(client.chat.completions.create({ ...chat, ...streamed })),
    together: await client.chat.completions.stream(chat).finalChatCompletion(),
    refused: await failure(client.completions.create({ ...completion, temperature: -1 })),
    unknown: await failure(client.completions.create({ ...completion, model: "nobody" })),
  }));
}

main();
