/** Calls the server's API. Throws `Trouble`, or an AbortError if the signal was aborted. */

/** An error with a message for the page's user. */
export class Trouble extends Error {}

/** The server requires a key, and none was given. */
export class KeyNeeded extends Trouble {}

const brokenOff = () => new Trouble("The stream ended early: the server stopped or the connection was lost.");

const unknownKey = () => new Trouble("The server does not accept this API key.");

const OPENINGS = { 429: "Too many requests:", 503: "The server is busy:" };

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
      if (chunk.error) throw new Trouble(`The server failed while answering: ${sentence(chunk.error.message)}`);
      yield chunk;
    }
  } catch (error) {
    throw signal.aborted || error instanceof Trouble ? error : brokenOff();
  }
  throw brokenOff();
}

async function ask(path, options, key) {
  const response = await fetch(path, options).catch((error) => {
    throw options.signal?.aborted ? error : new Trouble("The server cannot be reached. Is it still running?");
  });
  if (!response.ok) throw await refusal(response, key);
  return response;
}

/** Return the error for a response other than 2xx. */
async function refusal(response, key) {
  const { status, statusText } = response;
  if (status === 401 && key) return unknownKey();
  if (status === 401) return new KeyNeeded("This server requires an API key. Enter one under Settings.");
  const seconds = response.headers.get("retry-after");
  const again = seconds ? ` Try again in ${seconds} ${seconds === "1" ? "second" : "seconds"}.` : "";
  const body = await response.json().catch(() => null);
  const words = sentence(body?.error?.message ?? `it answered ${status} ${statusText}`);
  return new Trouble(`${OPENINGS[status] ?? (status < 500 ? "The server refused this:" : "The server failed:")} ${words}${again}`);
}

function sentence(words) {
  const text = String(words ?? "no reason given").trim();
  return /[.!?]$/.test(text) ? text : `${text}.`;
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
