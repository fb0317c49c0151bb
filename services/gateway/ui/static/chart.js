// A small chart over time, in SVG. Its title and description are what a screen reader says of it.

import { svg } from "./dom.js";
import { clockTime } from "./words.js";

const HEIGHT = 170, LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 22;

/**
 * `series`: [{points: [{x: ms, y}], color: "--device", kind: "line" | "dots", gapMs}]; `from`..`to` in ms; `most` the top of
 * the scale; `word` writes a value; `width` is that of its place, in pixels. A line is broken where nothing is known for `gapMs`.
 */
export function chart({ title, description, series, from, to, most, word, width }) {
  const across = (ms) => LEFT + ((ms - from) / (to - from)) * (width - LEFT - RIGHT);
  const up = (value) => HEIGHT - BOTTOM - (Math.min(value, most) / most) * (HEIGHT - TOP - BOTTOM);
  const marks = [0, 0.5, 1].map((share) => {
    const y = up(most * share);
    return [svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }),
      svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end", text: word(most * share) })];
  });
  const times = [from, (from + to) / 2, to].map((ms, place) =>
    svg("text", { x: across(ms), y: HEIGHT - 6, "text-anchor": ["start", "middle", "end"][place], text: clockTime(ms) }));
  const drawn = series.flatMap(({ points, color, kind, gapMs }) => {
    const seen = points.filter(({ x }) => x >= from && x <= to);
    const at = ({ x, y }) => `${across(x).toFixed(1)} ${up(y).toFixed(1)}`;
    const style = { stroke: `var(${color})` };
    const isCut = (place) => !(seen[place]?.x - seen[place - 1]?.x <= gapMs);
    const isMarked = (place) => kind === "dots" || seen.length <= 60 || (isCut(place) && isCut(place + 1));
    const line = kind === "line" ? seen.map((point, place) => `${isCut(place) ? "M" : "L"}${at(point)}`).join("") : "";
    // However many dots there are, they are one element: a line of no length with a round end for each.
    const dots = seen.map((point, place) => (isMarked(place) ? `M${at(point)}h0` : "")).join("");
    return [line && svg("path", { class: "line", d: line, style }), dots && svg("path", { class: "dots", d: dots, style })];
  });
  return svg("svg", { class: "chart", viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${title}. ${description}` },
    ...marks.flat(), ...times, ...drawn.filter(Boolean));
}

/** The next number of 1, 2 or 5 times a power of ten that is no less. */
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}
