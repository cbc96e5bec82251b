/** The note next to what is pointed at. */

import { element } from "./elements.js";

const GAP = 10; // pixels

const note = document.getElementById("hint");

/** Show lines of text, the first as a heading, near a place in the window. */
export function show(place, [heading, ...lines]) {
  note.replaceChildren(element("strong", "", heading), ...lines.map((line) => element("span", "", line)));
  note.hidden = false;
  const { width, height } = note.getBoundingClientRect();
  const room = document.documentElement.clientWidth - width - GAP;
  const above = place.top - height - GAP;
  note.style.left = `${scrollX + Math.max(GAP, Math.min(place.left, room))}px`;
  note.style.top = `${scrollY + (above > 0 ? above : place.bottom + GAP)}px`;
}

export function hide() {
  note.hidden = true;
}
