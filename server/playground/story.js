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
  #output; // its children are the tokens' spans
  #starts = []; // offset of each token's first character
  #numCharacters = 0;

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
    this.#starts = [];
    this.#numCharacters = 0;
  }

  /** Add a chunk: its text, and the exits and offsets of its tokens. A chunk may have no tokens. */
  add(text, exits, offsets) {
    for (const exit of exits) {
      const span = document.createElement("span");
      Object.assign(span.dataset, { exit, tone: tone(exit) });
      span.tabIndex = this.#output.firstChild ? -1 : 0; // the Tab key reaches one token
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
      this.#span(owner).append(...withGaps(own.join(""), this.#output.textContent.slice(-1)));
      this.#numCharacters += own.length;
    }
  }

  text(number) {
    return this.#span(number).textContent;
  }

  /** Return the rectangle of a token in the window, or of its first line if the token spans two lines. */
  place(number) {
    return this.#span(number).getClientRects()[0];
  }

  /** Highlight a token. Null removes the highlight. */
  mark(number) {
    this.#output.querySelector(".marked")?.classList.remove("marked");
    this.#span(number)?.classList.add("marked");
  }

  #span(number) {
    return this.#output.children[number];
  }

  #number(target) {
    const number = [...this.#output.children].indexOf(target);
    return number < 0 ? null : number;
  }

  #walk(event) {
    const step = STEPS[event.key];
    const at = this.#number(event.target);
    if (step === undefined || at === null) return;
    event.preventDefault();
    this.#span(Math.min(Math.max(at + step, 0), this.#output.children.length - 1)).focus();
  }

  #reach(number) {
    if (number === null) return;
    this.#output.querySelector('[tabindex="0"]').tabIndex = -1;
    this.#span(number).tabIndex = 0;
  }
}
