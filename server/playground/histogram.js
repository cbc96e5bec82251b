/** Shows the number of tokens per exit. It is also the legend of the colours. */

import { element, tone } from "./elements.js";

export class Histogram {
  #rows;
  #counts;

  constructor(place, model) {
    this.#counts = model.depths.map(() => 0);
    this.#rows = model.depths.map((depth, index) => new Row(index + 1, `${model.unit} ${depth}`));
    const table = element("table", "", element("caption", "", "Tokens per exit"), ...this.#rows.map((row) => row.line));
    place.replaceChildren(table);
  }

  add(exits) {
    for (const exit of exits) this.#counts[exit - 1] += 1;
  }

  show() {
    const total = this.#counts.reduce((sum, count) => sum + count, 0);
    const most = Math.max(...this.#counts);
    for (const [index, row] of this.#rows.entries()) row.show(this.#counts[index], total, most);
  }
}

class Row {
  #bar = element("span", "bar");
  #count = element("td", "count");
  #share = element("td", "count");

  constructor(exit, place) {
    this.line = element(
      "tr",
      "",
      element("th", "", element("span", "sample", `exit ${exit}`)),
      element("td", "quiet", place),
      element("td", "track", this.#bar),
      this.#count,
      this.#share,
    );
    this.line.dataset.tone = tone(exit);
    this.line.firstChild.scope = "row";
  }

  show(count, total, most) {
    this.#bar.style.inlineSize = most ? `${(100 * count) / most}%` : 0;
    this.#count.textContent = count;
    this.#share.textContent = total ? `${Math.round((100 * count) / total)}%` : "";
  }
}
