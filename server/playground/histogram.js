/** Shows the number of tokens per exit. It is also the legend of the colours. */

import { element, tone } from "./elements.js";

export class Histogram {
  #place;
  #model;
  #counts;

  constructor(place, model) {
    this.#place = place;
    this.#model = model;
    this.#counts = model.depths.map(() => 0);
  }

  add(exits) {
    for (const exit of exits) this.#counts[exit - 1] += 1;
  }

  show() {
    const total = this.#counts.reduce((sum, count) => sum + count, 0);
    const most = Math.max(...this.#counts);
    const rows = this.#counts.map((count, index) => this.#row(index, count, total, most));
    this.#place.replaceChildren(element("table", "", element("caption", "", "Tokens per exit"), ...rows));
  }

  #row(index, count, total, most) {
    const exit = element("th", "", element("span", "sample", `exit ${index + 1}`));
    exit.scope = "row";
    const bar = element("span", "bar");
    bar.style.inlineSize = most ? `${(100 * count) / most}%` : 0;
    const depth = element("td", "quiet", `${this.#model.unit} ${this.#model.depths[index]}`);
    const share = total ? `${Math.round((100 * count) / total)}%` : "";
    const cells = [exit, depth, element("td", "track", bar), element("td", "count", count), element("td", "count", share)];
    const line = element("tr", "", ...cells);
    line.dataset.tone = tone(index + 1);
    return line;
  }
}
