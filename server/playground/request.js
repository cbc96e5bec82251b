/** What is asked for, read from the form. */

const LARGEST_SEED = 2 ** 31;

const field = (id) => document.getElementById(id);

/** The body of a completion's request, without what says at which exits. */
export function request() {
  return { prompt: field("prompt").value, ...sampling() };
}

/** What stories and conversations have in common. */
export function sampling() {
  return {
    max_tokens: Number(field("length").value),
    temperature: numberOf("temperature"),
    top_p: numberOf("top-p"),
    seed: field("seed").value === "" ? Math.floor(Math.random() * LARGEST_SEED) : Number(field("seed").value),
    stop: stops(),
  };
}

/** Nothing if the field is empty: the server's default. */
const numberOf = (id) => (field(id).value === "" ? undefined : Number(field(id).value));

export const key = () => field("key").value.trim();

export const wantsMixture = () => field("compare").checked;

/** One a line; a line break within one is written \n. */
function stops() {
  const lines = field("stops").value.split("\n");
  return lines.filter((line) => line !== "").map((line) => line.replaceAll("\\n", "\n"));
}
