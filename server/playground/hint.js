/** The note next to the token or column under the pointer. */

import { element } from "./elements.js";

const GAP = 10; // pixels

const note = document.getElementById("hint");

/** Show lines of text near a rectangle in the window. The first line is the heading. */
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
