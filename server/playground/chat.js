/** A conversation: its turns, the answer being streamed, and the buttons of each turn. */

import { conversation } from "./api.js";
import { element } from "./elements.js";
import { rendered } from "./markdown.js";
import { key, sampling } from "./request.js";

const part = (id) => document.getElementById(id);

export class Chat {
  #turns = []; // {role, content, shown, depths}
  #log = part("messages");
  #occupy;

  /** `occupy` runs one thing at a time, and passes it the model and a signal that stops it. */
  constructor(occupy) {
    this.#occupy = occupy;
    part("chat").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#say();
    });
    part("clear").addEventListener("click", () => this.#keep(0));
  }

  #say() {
    const content = part("message").value.trim();
    if (!content) return;
    this.#occupy(async (model, signal) => {
      part("message").value = "";
      this.#add("user", content);
      await this.#answer(model, signal);
    });
  }

  async #answer(model, signal) {
    const system = part("system").value.trim();
    const history = this.#turns.map(({ role, content }) => ({ role, content }));
    const turn = this.#add("assistant", "");
    const messages = system ? [{ role: "system", content: system }, ...history] : history;
    try {
      for await (const chunk of conversation({ ...sampling(), messages }, key(), signal)) this.#take(turn, chunk, model);
    } catch (error) {
      if (!turn.content) this.#keep(this.#turns.length - 1);
      if (!signal.aborted) throw error;
    }
  }

  #take(turn, chunk, model) {
    const [choice] = chunk.choices;
    if (!choice) return;
    turn.content += choice.delta.content ?? "";
    turn.depths.push(...(choice.nvium?.exit_layers ?? []));
    this.#show(turn, model);
    turn.shown.scrollIntoView({ block: "nearest" });
  }

  #add(role, content) {
    const text = element("div", "text");
    const note = element("span", "quiet");
    const buttons = element("div", "buttons", ...(role === "assistant" ? [note] : []));
    const shown = element("article", "turn", text, buttons);
    shown.dataset.role = role;
    const turn = { role, content, depths: [], shown, text, note };
    buttons.append(this.#button("Copy", () => navigator.clipboard?.writeText(turn.content)));
    if (role === "assistant") buttons.append(this.#button("Regenerate", () => this.#regenerate(turn)));
    this.#turns.push(turn);
    this.#log.append(shown);
    this.#show(turn, null);
    return turn;
  }

  #show(turn, model) {
    turn.text.replaceChildren(...(turn.role === "user" ? [turn.content] : rendered(turn.content)));
    const { depths } = turn;
    if (!model || !depths.length) return;
    const mean = depths.reduce((sum, layer) => sum + layer, 0) / depths.length / model.numLayers;
    const depth = model.exitLayers.length > 1 ? `, mean depth ${mean.toFixed(2)}` : "";
    turn.note.textContent = `${depths.length} ${depths.length === 1 ? "token" : "tokens"}${depth}`;
  }

  #button(words, act) {
    const made = element("button", "small", words);
    made.type = "button";
    made.addEventListener("click", act);
    return made;
  }

  #regenerate(turn) {
    this.#occupy(async (model, signal) => {
      this.#keep(this.#turns.indexOf(turn));
      await this.#answer(model, signal);
    });
  }

  /** Drop all but the first turns. */
  #keep(number) {
    for (const { shown } of this.#turns.splice(number)) shown.remove();
  }
}
