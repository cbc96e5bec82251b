/** The page as a whole: which model there is, and what its buttons do. */

import { completion, servedModel } from "./api.js";
import { Chat } from "./chat.js";
import { hide } from "./hint.js";
import { key, request, wantsMixture } from "./request.js";
import { Run } from "./run.js";
import { remember, suggest } from "./settings.js";
import { KeyNeeded, Trouble } from "./trouble.js";

const NARROW = matchMedia("(max-width: 40rem)");
const STILL = matchMedia("(prefers-reduced-motion: reduce)");

const part = (id) => document.getElementById(id);

const ENDINGS = { stop: "ended", length: "reached its length" };

const exitsRun = new Run(part("exits-run"));
const mixtureRun = new Run(part("mixture-run"));

let model = null;
let running = null; // the AbortController of what runs

async function meet() {
  const { id, nvium } = await servedModel(key());
  model = { exitLayers: nvium.exit_layers, numLayers: nvium.num_layers };
  part("model").textContent = `${id}, ${model.numLayers} layers${exitsOf(model)}`;
  suggest({ temperature: nvium.suggested.temperature, "top-p": nvium.suggested.top_p });
  part("key").placeholder = key() ? "" : "not needed";
  document.body.classList.toggle("with-exits", model.exitLayers.length > 1);
}

/** Nothing of a dense model, which has one. */
function exitsOf({ exitLayers }) {
  if (exitLayers.length === 1) return "";
  return `, exits after ${exitLayers.slice(0, -1).join(", ")} and ${exitLayers.at(-1)}`;
}

/** Do something that may fail, and say so in words. */
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

async function write() {
  const body = request();
  const hasExits = model.exitLayers.length > 1;
  mixtureRun.isHidden = !(hasExits && wantsMixture());
  part("runs").classList.toggle("beside", !mixtureRun.isHidden);
  say("Writing…");
  const ending = await stream(exitsRun, body, "exits", hasExits ? "Each token leaves where its router says. " : "");
  if (mixtureRun.isHidden || running.signal.aborted) return say(`The story ${ending}.`);
  const beside = await stream(mixtureRun, body, "mixture", "Every token passes all exits, and their mixture is drawn from. ");
  say(`The story ${ending}, that of the mixture ${beside}.`);
}

/** One run from its first token to its last, or to where it was stopped. Returns how it ended, in words. */
async function stream(run, body, sampling, about) {
  const { signal } = running;
  run.begin(model, body.prompt, `${about}Seed ${body.seed}.`);
  if (run === exitsRun) bringIntoView();
  let reason = null;
  try {
    for await (const chunk of completion({ ...body, nvium: { sampling, text_offsets: true } }, key(), signal)) {
      run.take(chunk);
      reason ??= chunk.choices[0].finish_reason;
    }
  } catch (error) {
    if (!signal.aborted) throw error;
  } finally {
    run.end();
  }
  const ending = signal.aborted ? "was stopped" : ENDINGS[reason];
  return `${ending} after ${run.numTokens} ${run.numTokens === 1 ? "token" : "tokens"}`;
}

function say(words) {
  part("status").textContent = words;
}

/** Do one thing at a time, which is given the model and a signal that stops it. */
async function occupy(work) {
  if (running) return;
  running = new AbortController();
  setRunning(true);
  await attempt(async () => {
    if (!model) await meet();
    await work(model, running.signal);
  });
  running = null;
  setRunning(false);
}

/** Show one of the two tabs. */
function choose(name) {
  for (const each of ["story", "chat"]) part(`${each}-tab`).setAttribute("aria-selected", each === name);
  part("request").hidden = part("runs").hidden = name !== "story";
  part("chat").hidden = name !== "chat";
  part("status").textContent = part("trouble").textContent = "";
}

/** Where the story would begin below the window, move it up until it is seen, with the buttons above. */
function bringIntoView() {
  const isBelow = part("runs").getBoundingClientRect().top > innerHeight / 2;
  if (isBelow) part("actions").scrollIntoView({ behavior: STILL.matches ? "auto" : "smooth" });
}

function foldSettings() {
  part("settings").open = !NARROW.matches;
}

function setRunning(isRunning) {
  for (const [stop, start] of [["stop", "send"], ["hush", "say"]]) {
    const hadFocus = document.activeElement === part(stop);
    part(stop).disabled = !isRunning;
    part(start).setAttribute("aria-disabled", isRunning);
    if (hadFocus) part(start).focus();
  }
}

part("request").addEventListener("submit", (event) => {
  event.preventDefault();
  occupy(write);
});
document.addEventListener("invalid", () => (part("settings").open = true), { capture: true });
for (const id of ["stop", "hush"]) part(id).addEventListener("click", () => running?.abort());
for (const name of ["story", "chat"]) part(`${name}-tab`).addEventListener("click", () => choose(name));
part("key").addEventListener("change", () => attempt(meet));
part("numbers").addEventListener("change", showNumbers);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    running?.abort();
    hide();
  }
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    (part("chat").hidden ? part("request") : part("chat")).requestSubmit();
  }
});
NARROW.addEventListener("change", foldSettings);

function showNumbers() {
  part("runs").classList.toggle("numbered", part("numbers").checked);
}

remember();
showNumbers();
foldSettings();
new Chat(occupy);
attempt(meet);
