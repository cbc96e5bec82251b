/** What a run amounts to, in numbers: how soon, how fast, how deep. */

import { element } from "./elements.js";

export class Figures {
  #place;
  #model;
  #sent;
  #first = null;
  #last = null;
  #numTokens = 0;
  #numAtFirst = 0; // a first chunk may hold several tokens
  #depths = 0;
  #numRuns = 0;

  /** `sent` is when the request was, in milliseconds, as all times here. */
  constructor(place, model, sent) {
    this.#place = place;
    this.#model = model;
    this.#sent = sent;
    this.show();
  }

  add(exits, now) {
    if (!exits.length) return;
    const layers = this.#model.exitLayers;
    this.#numTokens += exits.length;
    this.#first ??= now;
    this.#numAtFirst ||= exits.length;
    this.#last = now;
    for (const exit of exits) {
      this.#depths += layers[exit - 1] / layers.at(-1);
      this.#numRuns += exit;
    }
  }

  show() {
    const { exitLayers } = this.#model;
    const seconds = (this.#last - this.#first) / 1000;
    this.#place.replaceChildren(
      ...figure("First token", this.#first && this.#first - this.#sent, 0, "ms", "after asking"),
      ...figure("Speed", seconds && (this.#numTokens - this.#numAtFirst) / seconds, 0, "tokens/s", `${this.#numTokens} tokens`),
      ...(exitLayers.length === 1 ? [] : this.#depth()),
    );
  }

  #depth() {
    const { exitLayers } = this.#model;
    return [
      ...figure("Mean depth", this.#numTokens && this.#depths / this.#numTokens, 2, "", "dense: 1.00"),
      ...figure("Blocks per token", this.#numTokens && this.#numRuns / this.#numTokens, 2, "", `dense: ${exitLayers.length}`),
    ];
  }
}

function figure(name, value, digits, unit, note) {
  const shown = element("dd", "value", value ? value.toFixed(digits) : "–");
  if (value && unit) shown.append(element("span", "unit", ` ${unit}`));
  return [element("div", "figure", element("dt", "", name), shown, element("dd", "note", note))];
}
