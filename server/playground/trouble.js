/** What went wrong, in words for the page's user. */

export class Trouble extends Error {}

/** The server wants a key, and was given none. */
export class KeyNeeded extends Trouble {}

const GONE = "The server cannot be reached. Is it still running?";
const BROKEN = "The stream broke off: the server has gone, or the connection to it.";
const NO_KEY = "This server asks for a key. Put one into the field “API key”.";
const WRONG_KEY = "The server does not know this key.";

export const unreachable = () => new Trouble(GONE);

export const brokenOff = () => new Trouble(BROKEN);

export const unknownKey = () => new Trouble(WRONG_KEY);

/** Trouble that was told within a stream, when its answer had begun. */
export const failed = (error) => new Trouble(`The server failed on the way: ${sentence(error.message)}`);

/** What an answer other than 2xx means. */
export async function refusal(response, hasKey) {
  if (response.status === 401) return hasKey ? unknownKey() : new KeyNeeded(NO_KEY);
  const told = await response.json().catch(() => null);
  const words = sentence(told?.error?.message ?? `it answered ${response.status} ${response.statusText}`);
  return new Trouble(`${opening(response.status)} ${words}${comeBack(response.headers.get("retry-after"))}`);
}

function opening(status) {
  if (status === 429) return "That was too often:";
  if (status === 503) return "The server cannot take this now:";
  return status < 500 ? "The server refused this:" : "The server failed:";
}

function comeBack(seconds) {
  return seconds ? ` Try again in ${seconds} ${seconds === "1" ? "second" : "seconds"}.` : "";
}

function sentence(words) {
  const text = String(words ?? "it did not say why").trim();
  return /[.!?]$/.test(text) ? text : `${text}.`;
}
