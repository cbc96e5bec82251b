/** The server's API, as far as the page needs it. Raises `Trouble`, or an AbortError where a signal asked for it. */

import { events } from "./events.js";
import { brokenOff, failed, refusal, unknownKey, unreachable } from "./trouble.js";

/** The model served: its id, exit layers and limits. */
export async function servedModel(key) {
  const response = await ask("v1/models", { headers: headers(key) }, key);
  return (await response.json()).data[0];
}

/** The chunks of a completion as they come. Leaving the loop or aborting the signal frees the request. */
export function completion(body, key, signal) {
  return chunks("v1/completions", body, key, signal);
}

/** The chunks of an answer to messages, likewise. */
export function conversation(body, key, signal) {
  return chunks("v1/chat/completions", body, key, signal);
}

async function* chunks(path, body, key, signal) {
  const asked = { ...body, model: "default", stream: true };
  const options = { method: "POST", headers: headers(key), body: JSON.stringify(asked), signal };
  const response = await ask(path, options, key);
  for await (const data of unbroken(events(response.body), signal)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw failed(chunk.error);
    yield chunk;
  }
  throw brokenOff();
}

async function ask(path, options, key) {
  const response = await fetch(path, options).catch((error) => {
    throw options.signal?.aborted ? error : unreachable();
  });
  if (!response.ok) throw await refusal(response, Boolean(key));
  return response;
}

async function* unbroken(source, signal) {
  try {
    yield* source;
  } catch (error) {
    throw signal.aborted ? error : brokenOff();
  }
}

/** Raises for what no key can be, which could not be sent either. */
function headers(key) {
  if (!/^[!-~]*$/.test(key)) throw unknownKey();
  const named = { "content-type": "application/json" };
  return key ? { ...named, authorization: `Bearer ${key}` } : named;
}
