/** One story in its panel: text, staircase, histogram, figures, and a note about the token under the pointer. */

import { Drawing } from "./drawing.js";
import { element, tone } from "./elements.js";
import { Figures, showHistogram } from "./figures.js";
import { Staircase } from "./staircase.js";
import { Story, withGaps } from "./story.js";

const GAP = 10; // pixels

const hint = document.getElementById("hint");

export class Run {
  #panel;
  #story;
  #tokens = []; // {exit, probability}
  #counts = []; // numbers of tokens by exit
  #redraw = null;

  constructor(panel) {
    this.#panel = panel;
    this.#story = new Story(panel.querySelector(".output"), (number) => {
      this.#point(number, () => this.#story.place(number));
    });
  }

  /** Clear the panel for a new story. */
  begin(model, prompt) {
    this.#panel.classList.add("writing");
    this.#part(".prompt").replaceChildren(...withGaps(prompt));
    this.#story.clear();
    this.#tokens = [];
    this.#counts = model.depths.map(() => 0);
    this.model = model;
    this.staircase = new Staircase(model.depths.length, model.isTied);
    this.drawing = new Drawing(this.#part(".staircase"), this.staircase, model, (row) => {
      this.#point(row, () => this.drawing.place(row));
    });
    this.figures = new Figures(this.#part(".figures"), model, performance.now());
    this.#show();
  }

  get numTokens() {
    return this.#tokens.length;
  }

  take(chunk) {
    const [choice] = chunk.choices;
    const { exits, exit_probabilities: probabilities, text_offsets: offsets } = choice.nvium;
    this.#tokens.push(...exits.map((exit, i) => ({ exit, probability: probabilities[i] })));
    this.#story.add(choice.text, exits, offsets);
    this.figures.add(exits.length, performance.now());
    for (const exit of exits) {
      this.#counts[exit - 1] += 1;
      this.drawing.add(this.staircase.emit(exit), tone(exit));
    }
    this.#redraw ??= requestAnimationFrame(() => this.#show());
  }

  end() {
    this.#panel.classList.remove("writing");
    this.drawing.end();
    this.#show();
  }

  #show() {
    cancelAnimationFrame(this.#redraw); // after the end, it would scroll back from where the user points
    this.#redraw = null;
    this.drawing.show();
    this.figures.show(this.#counts);
    showHistogram(this.#part(".exits"), this.model, this.#counts);
  }

  #point(number, place) {
    this.#story.mark(number);
    this.drawing?.mark(number);
    if (number === null) hide();
    else show(place(), this.#facts(number));
  }

  /** Return lines of text about a token. */
  #facts(number) {
    const { exit, probability } = this.#tokens[number];
    const { unit, depths } = this.model;
    const text = this.#story.text(number).trim();
    const heading = text ? `“${text}”` : "token without visible text";
    if (depths.length === 1) return [heading, `token ${number + 1}`];
    return [
      heading,
      `token ${number + 1} left at exit ${exit} of ${depths.length}, after ${unit} ${depths[exit - 1]} of ${depths.at(-1)}`,
      `exit probability ${probability.toFixed(3)}`,
      ...this.#skipped(number, exit),
    ];
  }

  /** Describe when the blocks above the token's exit were computed. */
  #skipped(row, exit) {
    const { part } = this.model;
    const blocks = Array.from({ length: this.staircase.numBlocks - exit }, (_, index) => exit + 1 + index);
    return blocks.map((block) => {
      const carrier = this.staircase.carrier(row, block);
      if (carrier !== undefined) return `${part} ${block} was computed later, with token ${carrier + 1}`;
      return `${part} ${block} ${this.#panel.classList.contains("writing") ? "is deferred" : "was not computed"}`;
    });
  }

  #part(selector) {
    return this.#panel.querySelector(selector);
  }
}

/** Show lines of text in the note next to a rectangle in the window. The first line is the heading. */
function show(place, [heading, ...lines]) {
  hint.replaceChildren(element("strong", "", heading), ...lines.map((line) => element("span", "", line)));
  hint.hidden = false;
  const { width, height } = hint.getBoundingClientRect();
  const room = document.documentElement.clientWidth - width - GAP;
  const above = place.top - height - GAP;
  hint.style.left = `${scrollX + Math.max(GAP, Math.min(place.left, room))}px`;
  hint.style.top = `${scrollY + (above > 0 ? above : place.bottom + GAP)}px`;
}

/** Hide the note. */
export function hide() {
  hint.hidden = true;
}
