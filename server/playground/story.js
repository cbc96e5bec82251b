/**
 * The text of a story, one span for each token.
 *
 * A chunk may hold several tokens, and text held back from earlier ones, so offsets map characters to tokens. The span of a
 * token without text of its own is empty: the end of text, half a character, part of a stop string.
 */

import { tone } from "./tones.js";

const STEPS = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, Home: -Infinity, End: Infinity };

export class Story {
  #output;
  #spans = [];
  #starts = []; // where the characters of each token begin
  #numCharacters = 0;
  #reachable = 0; // the token that the tab key goes to

  /** `onPoint` receives the number of the token pointed at or focused, counted from 0, or null. */
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
    this.#starts = [];
    this.#numCharacters = 0;
    this.#reachable = 0;
  }

  /** Add a chunk: its text, and the exits and offsets of its tokens, which may be none. */
  add(text, exits, offsets) {
    for (const exit of exits) {
      const span = document.createElement("span");
      Object.assign(span.dataset, { exit, tone: tone(exit) });
      span.tabIndex = this.#spans.length ? -1 : 0;
      this.#spans.push(span);
      this.#output.append(span);
    }
    this.#starts.push(...offsets);
    this.#distribute(Array.from(text));
  }

  /** Give each token its characters. Offsets count code points, not UTF-16 units. */
  #distribute(characters) {
    while (characters.length) {
      const owner = this.#starts.findLastIndex((start) => start <= this.#numCharacters);
      const end = this.#starts[owner + 1] ?? Infinity;
      const own = characters.splice(0, end - this.#numCharacters);
      this.#spans[owner].append(own.join(""));
      this.#numCharacters += own.length;
    }
  }

  text(number) {
    return this.#spans[number].textContent;
  }

  /** The token's place in the window; its first line if it spans two. */
  place(number) {
    return this.#spans[number].getClientRects()[0];
  }

  /** Highlight one token; null for none. */
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
