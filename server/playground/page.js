/** The page: shows the served model and handles the buttons. */

import { completion, KeyNeeded, servedModel, Trouble } from "./api.js";
import { element } from "./elements.js";
import { hide, Run } from "./run.js";

const BUSY = 1.25; // ratio of the times of two equal runs from which on the page calls the machine busy
const ENDINGS = { stop: "ended", length: "reached its length" };
const NUM_SEEDS = 10 ** 6; // a seed fits into its field

const part = (id) => document.getElementById(id);

const numberOf = (id) => (part(id).value === "" ? undefined : Number(part(id).value));

const key = () => part("key").value.trim();

const run = new Run(part("run"));

let model = null;
let running = null; // the running task: {stop, ended, yields}
let written = null; // the request of the complete story

async function loadModel() {
  const { id, nvium, max_model_len } = await servedModel(key());
  model = depthsOf(nvium);
  const loops = nvium.num_loops > 1 ? ` in ${nvium.num_loops} loops` : "";
  const ends = model.depths.slice(0, -1).join(", ");
  const exits = ends ? `, exits after ${model.unit}s ${ends} and ${model.depths.at(-1)}` : ""; // none in a dense model
  part("model").textContent = `${id}, ${nvium.num_layers} layers${loops}${exits}`;
  const suggested = { temperature: nvium.suggested.temperature, "top-p": nvium.suggested.top_p };
  for (const [id, value] of Object.entries(suggested)) if (part(id).value === "") part(id).value = value;
  part("length").max = max_model_len;
  part("key").placeholder = key() ? "" : "not needed";
  document.body.classList.toggle("with-exits", model.depths.length > 1);
  document.body.classList.toggle("with-loops", model.part === "loop");
}

/**
 * Return the depths of the exits, counted in loops if all exits of a looped model end a loop.
 *
 * `part` names what lies between two exits. `isTied`: these parts share their weights.
 */
function depthsOf({ exit_layers: layers, num_layers: numLayers, num_loops: numLoops }) {
  const depths = layers.map((layer) => layer / numLayers);
  if (numLoops === 1) return { unit: "layer", part: "block", depths: layers, isTied: false };
  if (!depths.every(Number.isInteger)) return { unit: "layer call", part: "block", depths: layers, isTied: false };
  const isTied = depths.every((depth, index) => depth === depths[0] * (index + 1));
  return { unit: "loop", part: depths[0] === 1 && isTied ? "loop" : "block", depths, isTied };
}

/** Return the body of a completion request, read from the form. An empty field keeps the server's default. */
function request() {
  return {
    prompt: part("prompt").value,
    max_tokens: numberOf("length"),
    temperature: numberOf("temperature"),
    top_p: numberOf("top-p"),
    seed: numberOf("seed") ?? Math.floor(Math.random() * NUM_SEEDS),
  };
}

/** Run a function and show its error, if any. */
async function attempt(work) {
  part("trouble").textContent = "";
  try {
    await work();
  } catch (error) {
    part("status").textContent = "";
    part("settings").open = true;
    if (error instanceof KeyNeeded) part("key").placeholder = "needed";
    part("trouble").textContent = error instanceof Trouble ? error.message : `The page failed: ${error.message}`;
  }
}

/** Stream a story until it ends or the signal aborts it. */
async function write(body, signal) {
  part("status").textContent = "Writing…";
  run.begin(model, body.prompt);
  part("gain").textContent = "";
  part("measure").hidden = true;
  let reason = null;
  try {
    for await (const chunk of completion({ ...body, nvium: { text_offsets: true } }, key(), signal)) {
      run.take(chunk);
      reason ??= chunk.choices[0].finish_reason;
    }
  } catch (error) {
    if (!signal.aborted) throw error;
  } finally {
    run.end();
  }
  const ending = signal.aborted ? "was stopped" : ENDINGS[reason];
  const tokens = `${run.numTokens} ${run.numTokens === 1 ? "token" : "tokens"}`;
  part("status").replaceChildren(`The story ${ending} after ${tokens}. `, seedUsed(body.seed), ".");
  part("measure").hidden = signal.aborted;
  written = body;
}

/** Create a button that puts the seed into its field. */
function seedUsed(seed) {
  const button = element("button", "", `Seed ${seed}`);
  Object.assign(button, { type: "button", id: "seed-used", title: "Use this seed again" });
  button.addEventListener("click", () => {
    part("seed").value = seed;
    part("settings").open = true;
  });
  return button;
}

/** Generate the story again, twice with and twice without early exits, and show both durations. */
async function measure(signal) {
  part("gain").textContent = "Measuring…";
  const seconds = { true: [], false: [] };
  for (const earlyExits of [true, false, false, true]) {
    const times = [];
    try {
      for await (const _ of completion({ ...written, nvium: { early_exits: earlyExits } }, key(), signal)) {
        times.push(performance.now());
      }
    } catch (error) {
      part("gain").textContent = "";
      if (signal.aborted) return;
      throw error;
    }
    seconds[earlyExits].push((times.at(-1) - times[0]) / 1000);
  }
  part("gain").textContent = gainOf(seconds.true, seconds.false);
}

function gainOf(early, dense) {
  const [ours, theirs] = [early, dense].map(([first, second]) => first + second);
  const spread = Math.max(...[early, dense].map((two) => Math.max(...two) / Math.min(...two)));
  const busy = spread < BUSY ? "" : ` But equal runs differ by ${Math.round(100 * (spread - 1))}%: the machine is busy.`;
  const ratio = (theirs / ours).toFixed(2);
  return `${ratio} times as fast with early exits: ${ours.toFixed(2)} s for two runs, ${theirs.toFixed(2)} s without.${busy}`;
}

/** Run one task at a time. If the running task `yields`, a new task stops it. Otherwise the new task is ignored. */
async function runAlone(work, yields = false) {
  if (running && !running.yields) return;
  running?.stop.abort();
  await running?.ended;
  if (running) return;
  const stop = new AbortController();
  const ended = attempt(async () => {
    if (!model) await loadModel();
    await work(stop.signal);
  });
  running = { stop, ended, yields };
  setButtons({ canStop: true, canStart: yields });
  await ended;
  running = null;
  setButtons({ canStop: false, canStart: true });
}

function setButtons({ canStop, canStart }) {
  const hadFocus = document.activeElement === part("stop");
  part("stop").disabled = !canStop;
  part("send").setAttribute("aria-disabled", !canStart);
  if (hadFocus) part("send").focus();
}

part("request").addEventListener("submit", (event) => {
  event.preventDefault();
  runAlone((signal) => write(request(), signal));
});
part("measure").addEventListener("click", () => runAlone(measure, true));
document.addEventListener("invalid", () => (part("settings").open = true), { capture: true });
part("stop").addEventListener("click", () => running?.stop.abort());
part("key").addEventListener("change", () => attempt(loadModel));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    running?.stop.abort();
    hide();
  }
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) part("request").requestSubmit();
});

runAlone((signal) => write(request(), signal), true);
