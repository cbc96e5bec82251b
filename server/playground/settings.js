/** What was set last time is there again: kept by the browser, for this page alone. A key is not kept. */

const KEPT = ["temperature", "top-p", "length", "seed", "stops", "compare", "numbers", "system"];
const NAME = "nvium-settings";

const field = (id) => document.getElementById(id);

/** Fill the fields with what was kept, and keep what is changed from now on. */
export function remember() {
  const kept = read();
  for (const id of KEPT) {
    if (id in kept) put(field(id), kept[id]);
    field(id).addEventListener("change", () => write());
  }
}

/** Fill the fields of which nothing was kept. */
export function suggest(values) {
  for (const [id, suggested] of Object.entries(values)) if (field(id).value === "") put(field(id), suggested);
}

function read() {
  try {
    return JSON.parse(localStorage.getItem(NAME)) ?? {};
  } catch {
    return {}; // not allowed to, or not ours
  }
}

function write() {
  try {
    localStorage.setItem(NAME, JSON.stringify(Object.fromEntries(KEPT.map((id) => [id, value(field(id))]))));
  } catch {
    // a page that may keep nothing goes on without
  }
}

const value = (input) => (input.type === "checkbox" ? input.checked : input.value);

function put(input, kept) {
  if (input.type === "checkbox") input.checked = kept === true;
  else input.value = String(kept);
}
