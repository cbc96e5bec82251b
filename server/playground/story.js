/**
 * The text of a story, one span for each token.
 *
 * The text of a chunk with several tokens does not say where one ends, so it stands in the span of the last; those before
 * it are empty, as are tokens without text: the end of the text, half of a character, what may become a stop string.
 */

import { tone } from "./tones.js";

const STEPS = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, Home: -Infinity, End: Infinity };

export class Story {
  #output;
  #spans = [];
  #reachable = 0; // the token that the tab key goes to

  /** `onPoint` is told the number of the token pointed at or focused, counted from 0, or null. */
  constructor(output, onPoint) {
    this.#output = output;
    const point = (event) => onPoint(this.#number(event.target));
    for (const kind of ["pointerover", "click", "focusin"]) output.addEventListener(kind, point);
    for (const kind of ["pointerleave", "focusout"]) output.addEventListener(kind, () => onPoint(null));
    output.addEventListener("focusin", (event) => this.#reach(this.#number(event.target)));
    output.addEventListener("keydown", (event) => this.#walk(event));
  }

  clear() {
    this.#output.replaceChildren();
    this.#spans = [];
    this.#reachable = 0;
  }

  /** A chunk: its text and the exits of its tokens, of which there may be none. */
  add(text, exits) {
    for (const exit of exits) {
      const span = document.createElement("span");
      Object.assign(span.dataset, { exit, tone: tone(exit) });
      span.tabIndex = this.#spans.length ? -1 : 0;
      this.#spans.push(span);
      this.#output.append(span);
    }
    if (text) (this.#spans.at(-1) ?? this.#output).append(text);
  }

  text(number) {
    return this.#spans[number].textContent;
  }

  /** Where a token stands in the window; of one over two lines, its beginning. */
  place(number) {
    return this.#spans[number].getClientRects()[0];
  }

  /** Let one token stand out, or none. */
  mark(number) {
    this.#output.querySelector(".marked")?.classList.remove("marked");
    this.#spans[number]?.classList.add("marked");
  }

  #number(target) {
    const number = this.#spans.indexOf(target);
    return number < 0 ? null : number;
  }

  #walk(event) {
    const step = STEPS[event.key];
    const at = this.#number(event.target);
    if (step === undefined || at === null) return;
    event.preventDefault();
    this.#spans[Math.min(Math.max(at + step, 0), this.#spans.length - 1)].focus();
  }

  #reach(number) {
    if (number === null) return;
    this.#spans[this.#reachable].tabIndex = -1;
    this.#spans[number].tabIndex = 0;
    this.#reachable = number;
  }
}
