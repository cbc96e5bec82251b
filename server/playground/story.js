/**
 * The text of a story, with a span per token.
 *
 * A chunk may contain several tokens, and held-back text of earlier tokens. So offsets map characters to tokens.
 * The span of a token without visible text is empty: end-of-text, an incomplete character, a part of a stop string.
 */

import { element, tone } from "./elements.js";

const STEPS = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, Home: -Infinity, End: Infinity };

/** Put line breaks that follow another line break into an element of their own, which is lower than a line. */
export function withGaps(text, last = "") {
  const [first, ...others] = (last + text).split(/(?<=\n)(\n+)/);
  return [first.slice(last.length), ...others.map((piece, i) => (i % 2 ? piece : element("span", "gap", piece)))];
}

export class Story {
  #output;
  #spans = [];
  #starts = []; // offset of each token's first character
  #numCharacters = 0;
  #last = ""; // the last character
  #reachable = 0; // number of the token that the Tab key reaches

  /** `onPoint` receives the number, counted from 0, of the token that has the pointer or the focus. Null: no token. */
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
    this.#last = "";
    this.#reachable = 0;
  }

  /** Add a chunk: its text, and the exits and offsets of its tokens. A chunk may have no tokens. */
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

  /** Append each character to its token's span. Offsets count code points, not UTF-16 units. */
  #distribute(characters) {
    while (characters.length) {
      const owner = this.#starts.findLastIndex((start) => start <= this.#numCharacters);
      const end = this.#starts[owner + 1] ?? Infinity;
      const own = characters.splice(0, end - this.#numCharacters);
      this.#spans[owner].append(...withGaps(own.join(""), this.#last));
      this.#numCharacters += own.length;
      this.#last = own.at(-1);
    }
  }

  text(number) {
    return this.#spans[number].textContent;
  }

  /** Return the rectangle of a token in the window, or of its first line if the token spans two lines. */
  place(number) {
    return this.#spans[number].getClientRects()[0];
  }

  /** Highlight a token. Null removes the highlight. */
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
