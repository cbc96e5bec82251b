/** The request, read from the form. */

const NUM_SEEDS = 10 ** 6; // a seed fits into its field

const field = (id) => document.getElementById(id);

/** Return the body of a completion request. An empty field keeps the server's default. */
export function request() {
  return {
    prompt: field("prompt").value,
    max_tokens: numberOf("length"),
    temperature: numberOf("temperature"),
    top_p: numberOf("top-p"),
    seed: numberOf("seed") ?? Math.floor(Math.random() * NUM_SEEDS),
  };
}

const numberOf = (id) => (field(id).value === "" ? undefined : Number(field(id).value));

export const key = () => field("key").value.trim();

/** Fill the empty fields. */
export function suggest(values) {
  for (const [id, suggested] of Object.entries(values)) if (field(id).value === "") field(id).value = suggested;
}
