/** Calls the server's API. Throws `Trouble`, or an AbortError if the signal was aborted. */

import { brokenOff, failed, refusal, Trouble, unknownKey, unreachable } from "./trouble.js";

/** Return the served model: its id, exit layers and limits. */
export async function servedModel(key) {
  const response = await ask("v1/models", { headers: headers(key) }, key);
  return (await response.json()).data[0];
}

/** Yield the chunks of a completion. Leaving the loop or aborting the signal cancels the request. */
export async function* completion(body, key, signal) {
  const content = JSON.stringify({ ...body, model: "default", stream: true });
  const options = { method: "POST", headers: headers(key), body: content, signal };
  const response = await ask("v1/completions", options, key);
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw failed(chunk.error);
      yield chunk;
    }
  } catch (error) {
    throw signal.aborted || error instanceof Trouble ? error : brokenOff();
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

/** Yield the data of each server-sent event as text. Skip keep-alive comments. */
export async function* events(body) {
  let held = "";
  for await (const text of pieces(body)) {
    const parts = (held + text).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) yield part.slice("data: ".length);
    }
  }
}

async function* pieces(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let piece; !(piece = await reader.read()).done; ) yield piece.value;
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Throw if the key contains characters that a header cannot carry. */
function headers(key) {
  if (!/^[!-~]*$/.test(key)) throw unknownKey();
  const named = { "content-type": "application/json" };
  return key ? { ...named, authorization: `Bearer ${key}` } : named;
}
