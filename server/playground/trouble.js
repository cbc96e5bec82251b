/** Error messages for the page's user. */

export class Trouble extends Error {}

/** The server requires a key, and none was given. */
export class KeyNeeded extends Trouble {}

export const unreachable = () => new Trouble("The server cannot be reached. Is it still running?");

export const brokenOff = () => new Trouble("The stream ended early: the server stopped or the connection was lost.");

export const unknownKey = () => new Trouble("The server does not accept this API key.");

const keyNeeded = () => new KeyNeeded("This server requires an API key. Enter one under Settings.");

/** An error event in a stream. */
export const failed = (error) => new Trouble(`The server failed while answering: ${sentence(error.message)}`);

/** Return the error for a response other than 2xx. */
export async function refusal(response, hasKey) {
  if (response.status === 401) return hasKey ? unknownKey() : keyNeeded();
  const body = await response.json().catch(() => null);
  const words = sentence(body?.error?.message ?? `it answered ${response.status} ${response.statusText}`);
  return new Trouble(`${opening(response.status)} ${words}${retryAfter(response.headers.get("retry-after"))}`);
}

function opening(status) {
  if (status === 429) return "Too many requests:";
  if (status === 503) return "The server is busy:";
  return status < 500 ? "The server refused this:" : "The server failed:";
}

function retryAfter(seconds) {
  return seconds ? ` Try again in ${seconds} ${seconds === "1" ? "second" : "seconds"}.` : "";
}

function sentence(words) {
  const text = String(words ?? "no reason given").trim();
  return /[.!?]$/.test(text) ? text : `${text}.`;
}
