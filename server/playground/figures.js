/** Shows a story's time to first token, throughput and mean depth. */

import { element } from "./elements.js";

const MIN_TOKENS = 16;
const MIN_SECONDS = 0.05; // show no speed for a shorter story: its chunks arrive together

export class Figures {
  #place;
  #model;
  #sent;
  #first = null;
  #last = null;
  #numTokens = 0;
  #numAtFirst = 0; // number of tokens in the first chunk
  #depths = 0;
  #numRuns = 0;

  /** `sent` is the time of the request. Times are in milliseconds. */
  constructor(place, model, sent) {
    this.#place = place;
    this.#model = model;
    this.#sent = sent;
    this.show();
  }

  add(exits, now) {
    if (!exits.length) return;
    const { depths } = this.#model;
    this.#numTokens += exits.length;
    this.#first ??= now;
    this.#numAtFirst ||= exits.length;
    this.#last = now;
    for (const exit of exits) {
      this.#depths += depths[exit - 1] / depths.at(-1);
      this.#numRuns += exit;
    }
  }

  show() {
    this.#place.replaceChildren(
      ...figure("First token", this.#first && this.#first - this.#sent, 0, "ms", "after the request"),
      ...figure("Speed", this.#speed(), 0, "tokens/s", `${this.#numTokens} tokens`),
      ...(this.#model.depths.length === 1 ? [] : this.#depth()),
    );
  }

  /** Return the tokens per second after the first chunk, or undefined for a short story. */
  #speed() {
    const seconds = (this.#last - this.#first) / 1000;
    const numTokens = this.#numTokens - this.#numAtFirst;
    return numTokens >= MIN_TOKENS && seconds >= MIN_SECONDS ? numTokens / seconds : undefined;
  }

  #depth() {
    const { unit, part, depths } = this.#model;
    const parts = part === "loop" ? "Loops per token" : "Blocks per token";
    return [
      ...figure("Mean depth", this.#numTokens && this.#depths / this.#numTokens, 2, "", `all ${unit}s: 1.00`),
      ...figure(parts, this.#numTokens && this.#numRuns / this.#numTokens, 2, "", `all ${unit}s: ${depths.length}`),
    ];
  }
}

function figure(name, value, digits, unit, note) {
  const shown = element("dd", "value", value ? value.toFixed(digits) : "–");
  if (value && unit) shown.append(element("span", "unit", ` ${unit}`));
  return [element("div", "figure", element("dt", "", name), shown, element("dd", "note", note))];
}
