import { element, tone } from "./elements.js";

/** Show the number of tokens by exit. This is also the legend of the colours. */
export function showHistogram(place, { unit, depths }, counts) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  const most = Math.max(...counts);
  const rows = counts.map((count, index) => {
    const exit = element("th", "", element("span", "sample", `exit ${index + 1}`));
    exit.scope = "row";
    const bar = element("span", "bar");
    bar.style.inlineSize = most ? `${(100 * count) / most}%` : 0;
    const depth = element("td", "quiet", `${unit} ${depths[index]}`);
    const share = total ? `${Math.round((100 * count) / total)}%` : "";
    const cells = [exit, depth, element("td", "track", bar), element("td", "count", count), element("td", "count", share)];
    const line = element("tr", "", ...cells);
    line.dataset.tone = tone(index + 1);
    return line;
  });
  place.replaceChildren(element("table", "", element("caption", "", "Tokens per exit"), ...rows));
}
