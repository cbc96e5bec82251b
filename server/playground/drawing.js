/** Draws a staircase while it grows: a lane per block, a column per row, a bar per run. */

import { element, set, shape } from "./elements.js";

const PITCH = 13; // pixels from one row to the next
const CELL = 11;
const LANE = 26;
const BAR = 18;
const PROMPT = 26; // width of the column for all rows of the prompt

export class Drawing {
  #staircase;
  #svg = shape("svg", { role: "img" });
  #bars = shape("g", {});
  #mark = shape("rect", { class: "mark", y: 0, width: PITCH, visibility: "hidden" });
  #scroller = element("div", "scroller");
  #follows = true;
  #returns = false; // whether to scroll back to the newest row when no row is highlighted
  #isOver = false;
  #counts;
  #lanes;

  /** `onPoint` receives the row under the pointer, or null. */
  constructor(place, staircase, { unit, part, depths }, onPoint) {
    this.#staircase = staircase;
    const names = depths.map((to, index) => {
      const from = (depths[index - 1] ?? 0) + 1;
      const name = element("li", "", `${part} ${index + 1}`);
      name.title = from === to ? `${unit} ${to}` : `${unit}s ${from} to ${to}`;
      return name;
    });
    this.#lanes = depths.map((_, index) => shape("rect", { class: "deferred", ...this.#lane(index + 1), width: 0 }));
    this.#svg.setAttribute("height", LANE * staircase.numBlocks);
    this.#svg.setAttribute("aria-label", "The staircase. The tokens' notes contain the same information");
    this.#mark.setAttribute("height", LANE * staircase.numBlocks);
    this.#svg.append(this.#mark, this.#bars, ...this.#lanes);
    this.#scroller.append(this.#svg);
    this.#counts = depths.map(() => element("li"));
    place.replaceChildren(list("names", names), this.#scroller, list("counts", this.#counts));
    place.classList.remove("over");
    this.#listen(onPoint);
  }

  /** Draw the runs of the newest row's Steps, and the row in its exit's tone. */
  add(runs, tone) {
    const front = this.#staircase.numRows - 1;
    const exit = runs.findLast(({ last }) => last === front).block;
    for (const { block, first, last } of runs) {
      const lane = this.#lane(block);
      const end = Math.min(last + 1, front);
      const piggybacked = { x: start(first), width: start(end) - start(first) };
      if (first < end) this.#bars.append(shape("rect", { ...lane, class: "piggybacked", ...piggybacked }));
      const kind = block === exit ? "emitted" : "passed";
      if (last === front) this.#bars.append(shape("rect", { ...lane, class: kind, "data-tone": tone, ...span(last, last + 1) }));
    }
  }

  /** Draw the deferred rows. Scroll to the latest rows unless the user has scrolled away. */
  show() {
    this.#svg.setAttribute("width", start(this.#staircase.numRows));
    for (const [index, lane] of this.#lanes.entries()) {
      const { first, end } = this.#staircase.deferred(index + 1);
      set(lane, first < end ? span(first, end) : { width: 0 });
      this.#counts[index].textContent = first < end ? `${end - first} ${this.#isOver ? "dropped" : "deferred"}` : "";
    }
    if (this.#follows) this.#scrollToNewest();
  }

  #scrollToNewest() {
    this.#scroller.scrollLeft = this.#scroller.scrollWidth;
  }

  /** Mark the deferred rows as dropped, because the sequence has ended. */
  end() {
    this.#isOver = true;
    this.#scroller.parentElement.classList.add("over");
  }

  /** Highlight a row's column and scroll to it. Null removes the highlight and scrolls back to the newest row. */
  mark(row) {
    this.#mark.setAttribute("visibility", row === null ? "hidden" : "visible");
    if (row === null) {
      if (this.#returns) this.#scrollToNewest();
      this.#returns = false;
      return;
    }
    const { x, width } = span(row, row + 1);
    set(this.#mark, { x: x - 1, width: width + 2 });
    const { scrollLeft, clientWidth } = this.#scroller;
    if (x >= scrollLeft && x + width <= scrollLeft + clientWidth) return;
    this.#returns ||= this.#follows;
    this.#scroller.scrollLeft = x - clientWidth / 2;
  }

  /** Return the rectangle of a row's column in the window. */
  place(row) {
    const { x, width } = span(row, row + 1);
    const { left, top, height } = this.#svg.getBoundingClientRect();
    return new DOMRect(left + x, top, width, height);
  }

  #lane(block) {
    return { y: LANE * (this.#staircase.numBlocks - block) + (LANE - BAR) / 2, height: BAR };
  }

  #listen(onPoint) {
    this.#scroller.addEventListener("scroll", () => {
      const { scrollLeft, clientWidth, scrollWidth } = this.#scroller;
      this.#follows = scrollLeft + clientWidth >= scrollWidth - PITCH;
    });
    const pointed = (event) => {
      const x = event.clientX - this.#svg.getBoundingClientRect().left;
      const row = x < PROMPT ? 0 : Math.floor((x - PROMPT) / PITCH) + 1;
      onPoint(row < this.#staircase.numRows ? row : null);
    };
    this.#svg.addEventListener("pointermove", pointed);
    this.#svg.addEventListener("click", pointed);
    this.#svg.addEventListener("pointerleave", () => onPoint(null));
  }
}

/** Return the x coordinate at which a row's column begins. */
function start(row) {
  return row === 0 ? 0 : PROMPT + (row - 1) * PITCH;
}

function span(first, end) {
  return { x: start(first), width: start(end) - start(first) - (PITCH - CELL) };
}

/** Create a list of blocks, the highest block first. */
function list(name, items) {
  const made = element("ol", name, ...items.toReversed());
  made.reversed = true;
  return made;
}
