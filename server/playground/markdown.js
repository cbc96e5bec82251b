/** Renders Markdown: headings, lists, code blocks, paragraphs; bold, italic and code within them. */

import { element } from "./elements.js";

const FENCE = /^```/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^\s*(?:([-*+])|\d+[.)])\s+(.*)$/;
const WITHIN = /(`[^`\n]+`)|(\*\*[^*\n]+\*\*)|(\*[^*\s][^*\n]*\*)/;

/** Elements for a text, which may be incomplete. */
export function rendered(text) {
  const lines = text.split("\n");
  const made = [];
  while (lines.length) {
    if (FENCE.test(lines[0])) made.push(code(lines));
    else if (ITEM.test(lines[0])) made.push(list(lines));
    else if (HEADING.test(lines[0])) made.push(heading(lines.shift()));
    else if (lines[0].trim() === "") lines.shift();
    else made.push(paragraph(lines));
  }
  return made;
}

function code(lines) {
  lines.shift();
  const inside = takeWhile(lines, (line) => !FENCE.test(line));
  lines.shift();
  return element("pre", "", element("code", "", inside.join("\n")));
}

function list(lines) {
  const tag = ITEM.exec(lines[0])[1] ? "ul" : "ol";
  const items = takeWhile(lines, (line) => ITEM.test(line) && Boolean(ITEM.exec(line)[1]) === (tag === "ul"));
  return element(tag, "", ...items.map((line) => element("li", "", ...spans(ITEM.exec(line)[2]))));
}

function heading(line) {
  const [, marks, words] = HEADING.exec(line);
  return element(`h${Math.min(marks.length + 2, 6)}`, "", ...spans(words));
}

function paragraph(lines) {
  const inside = takeWhile(lines, (line) => line.trim() !== "" && ![FENCE, ITEM, HEADING].some((rule) => rule.test(line)));
  return element("p", "", ...spans(inside.join("\n")));
}

function takeWhile(lines, holds) {
  const end = lines.findIndex((line) => !holds(line));
  return lines.splice(0, end < 0 ? lines.length : end);
}

/** Text with bold, italic and code. */
function spans(text) {
  const found = WITHIN.exec(text);
  if (!found) return text ? [text] : [];
  const [whole, verbatim, bold] = found;
  const inner = verbatim ? element("code", "", whole.slice(1, -1)) : emphasis(whole, bold);
  return [...spans(text.slice(0, found.index)), inner, ...spans(text.slice(found.index + whole.length))];
}

function emphasis(whole, bold) {
  return bold ? element("strong", "", ...spans(whole.slice(2, -2))) : element("em", "", ...spans(whole.slice(1, -1)));
}
