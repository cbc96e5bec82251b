/** One run in its panel: the story, its staircase, its exits and figures, and what is told of a single token. */

import { Drawing } from "./drawing.js";
import { Figures } from "./figures.js";
import { hide, show } from "./hint.js";
import { Histogram } from "./histogram.js";
import { Staircase } from "./staircase.js";
import { Story } from "./story.js";
import { tone } from "./tones.js";

export class Run {
  #panel;
  #story;
  #tokens = []; // {exit, layer, probability}
  #isOver = false;
  #redraw = null;

  constructor(panel) {
    this.#panel = panel;
    this.#story = new Story(panel.querySelector(".output"), (number) => {
      this.#point(number, () => this.#story.place(number));
    });
  }

  /** Make room for a new run of a model, {exitLayers}. `about` says what is run. */
  begin(model, prompt, about) {
    this.#panel.classList.add("writing");
    this.#part(".about").textContent = about;
    this.#part(".asked").textContent = prompt;
    this.#story.clear();
    this.#tokens = [];
    this.#isOver = false;
    this.model = model;
    this.staircase = new Staircase(model.exitLayers.length);
    this.drawing = new Drawing(this.#part(".staircase"), this.staircase, model.exitLayers, (row) => {
      this.#point(row, () => this.drawing.place(row));
    });
    this.histogram = new Histogram(this.#part(".exits"), model);
    this.figures = new Figures(this.#part(".figures"), model, performance.now());
  }

  get isHidden() {
    return this.#panel.hidden;
  }

  set isHidden(isHidden) {
    this.#panel.hidden = isHidden;
  }

  get numTokens() {
    return this.#tokens.length;
  }

  take(chunk) {
    const [choice] = chunk.choices;
    const { exits, exit_layers: layers, exit_probabilities: probabilities, text_offsets: offsets } = choice.nvium;
    this.#tokens.push(...exits.map((exit, i) => ({ exit, layer: layers[i], probability: probabilities[i] })));
    this.#story.add(choice.text, exits, offsets);
    this.figures.add(exits, performance.now());
    this.histogram.add(exits);
    for (const exit of exits) this.drawing.add(this.staircase.emit(exit), tone(exit));
    this.#redraw ??= requestAnimationFrame(() => this.#show());
  }

  end() {
    this.#isOver = true;
    this.#panel.classList.remove("writing");
    this.drawing.end();
    this.#show();
  }

  #show() {
    this.#redraw = null;
    this.drawing.show();
    this.figures.show();
    this.histogram.show();
  }

  #point(number, place) {
    this.#story.mark(number);
    this.drawing?.mark(number);
    if (number === null) hide();
    else show(place(), this.#told(number));
  }

  /** What is known of a token, in lines. */
  #told(number) {
    const { exit, layer, probability } = this.#tokens[number];
    const { exitLayers } = this.model;
    const text = this.#story.text(number).trim();
    const heading = text ? `“${text}”` : "a token without text of its own";
    if (exitLayers.length === 1) return [heading, `token ${number + 1}`];
    return [
      heading,
      `token ${number + 1} left at exit ${exit} of ${exitLayers.length}, after layer ${layer} of ${exitLayers.at(-1)}`,
      `exit probability ${probability.toFixed(3)}`,
      ...this.#fates(number, exit),
    ];
  }

  /** What became of the blocks that a token skipped. */
  #fates(row, exit) {
    const blocks = Array.from({ length: this.staircase.numBlocks - exit }, (_, index) => exit + 1 + index);
    return blocks.map((block) => {
      const carrier = this.staircase.carrier(row, block);
      if (carrier !== undefined) return `block ${block} was run later, with token ${carrier + 1}`;
      return this.#isOver ? `block ${block} was never needed` : `block ${block} waits`;
    });
  }

  #part(selector) {
    return this.#panel.querySelector(selector);
  }
}
