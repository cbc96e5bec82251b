/** Shows a story's time to first token, throughput, mean depth, and number of tokens by exit. */

import { element, tone } from "./elements.js";

const MIN_TOKENS = 16;
const MIN_SECONDS = 0.05; // show no speed for a shorter story: its chunks arrive together

export class Figures {
  #place;
  #model;
  #sent;
  #first = null;
  #last = null;
  #numAtFirst = 0; // number of tokens in the first chunk

  /** `sent` is the time of the request. Times are in milliseconds. */
  constructor(place, model, sent) {
    this.#place = place;
    this.#model = model;
    this.#sent = sent;
  }

  add(numTokens, now) {
    if (!numTokens) return;
    this.#first ??= now;
    this.#numAtFirst ||= numTokens;
    this.#last = now;
  }

  /** `counts` are the numbers of tokens by exit. */
  show(counts) {
    const numTokens = counts.reduce((sum, count) => sum + count, 0);
    this.#place.replaceChildren(
      ...figure("First token", this.#first && this.#first - this.#sent, 0, "ms", "after the request"),
      ...figure("Speed", this.#speed(numTokens), 0, "tokens/s", `${numTokens} tokens`),
      ...(counts.length === 1 ? [] : this.#depth(counts, numTokens)),
    );
  }

  /** Return the tokens per second after the first chunk, or undefined for a short story. */
  #speed(numTokens) {
    const seconds = (this.#last - this.#first) / 1000;
    const numTimed = numTokens - this.#numAtFirst;
    return numTimed >= MIN_TOKENS && seconds >= MIN_SECONDS ? numTimed / seconds : undefined;
  }

  #depth(counts, numTokens) {
    const { unit, part, depths } = this.#model;
    const mean = (valueOf) => numTokens && counts.reduce((sum, count, i) => sum + count * valueOf(i), 0) / numTokens;
    const parts = part === "loop" ? "Loops per token" : "Blocks per token";
    return [
      ...figure("Mean depth", mean((i) => depths[i] / depths.at(-1)), 2, "", `all ${unit}s: 1.00`),
      ...figure(parts, mean((i) => i + 1), 2, "", `all ${unit}s: ${depths.length}`),
    ];
  }
}

function figure(name, value, digits, unit, note) {
  const shown = element("dd", "value", value ? value.toFixed(digits) : "–");
  if (value && unit) shown.append(element("span", "unit", ` ${unit}`));
  return [element("div", "figure", element("dt", "", name), shown, element("dd", "note", note))];
}

/** Show the number of tokens by exit. This is also the legend of the colours. */
export function showHistogram(place, { unit, depths }, counts) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  const most = Math.max(...counts);
  const rows = counts.map((count, index) => {
    const exit = element("th", "", element("span", "sample", `exit ${index + 1}`));
    exit.scope = "row";
    const bar = element("span", "bar");
    bar.style.inlineSize = most ? `${(100 * count) / most}%` : 0;
    const depth = element("td", "quiet", `${unit} ${depths[index]}`);
    const share = total ? `${Math.round((100 * count) / total)}%` : "";
    const cells = [exit, depth, element("td", "track", bar), element("td", "count", count), element("td", "count", share)];
    const line = element("tr", "", ...cells);
    line.dataset.tone = tone(index + 1);
    return line;
  });
  place.replaceChildren(element("table", "", element("caption", "", "Tokens per exit"), ...rows));
}
