/** Creates elements from text and other elements, never from HTML. */

const NUM_TONES = 6;

export function element(tag, name, ...content) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(...content);
  return made;
}

export function shape(tag, attributes) {
  return set(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes);
}

export function set(target, attributes) {
  for (const [name, value] of Object.entries(attributes)) target.setAttribute(name, value);
  return target;
}

/** Return the number of an exit's colour and underline in page.css. Tones repeat after the sixth exit. */
export const tone = (exit) => ((exit - 1) % NUM_TONES) + 1;
