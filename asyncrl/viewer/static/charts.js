// One figure of curves, on uPlot: raw values behind smoothed ones, bands, marks, two scales, a linked cursor.
import { clock, explained, make, number, percent, tell, tip } from "view/dom.js";

export const DASHES = [[], [7, 4], [2, 3], [12, 3, 2, 3], [5, 2, 1, 2]];
const SYMBOLS = { restart: "↻", resume: "◆", lost: "✕", alert: "▲", validation: "•" };
const LEVELS = { resume: "advice", lost: "bad", alert: "warn" };
const NEAR = 9; // pixels: marks that are closer are one symbol
const FEW = 40; // points up to which each is a dot
export const INCREMENTS = { // between two ticks
  step: [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((n) => n * 10 ** power)),
  seconds: [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 604800],
};
const plots = new Map(); // by title; a figure that is made anew goes on with the cursor of the old one

/**
 * `spec`: {title, note, large, percent, log, by, lines, legend, marks, window, onZoom(low, high),
 * onStep(line, at)}.
 * A line: {label, stroke, dash, x, y, raw, bands: [[low, high]], right, steps}; all its lists are aligned.
 */
export function figure(spec) {
  const place = make("div", { class: "plot" });
  const element = make("figure",
    { class: spec.large && "large", id: `figure-${spec.title}`, tabindex: 0, "data-title": spec.title },
    make("figcaption", {}, make("b", {}, explained(spec.title)),
      make("span", { class: "legend" }, ...spec.legend)),
    place, spec.note && make("p", { class: "dim note" }, spec.note));
  let chart = null;
  const fit = () => {
    const { clientWidth: width, clientHeight: height } = place;
    if (!width) return; // its tab is hidden, or its group folded
    if (chart) return chart.setSize({ width, height });
    const { left = -10, top = -10 } = plots.get(spec.title)?.cursor ?? {};
    plots.get(spec.title)?.destroy();
    plots.set(spec.title, chart = plot(place, spec, width, height));
    chart.setCursor({ left, top }, false);
  };
  new ResizeObserver(fit).observe(place);
  element.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1, Enter: 0 }[event.key];
    if (!chart || way === undefined || event.target !== element) return;
    event.preventDefault();
    if (!way) return chosen(chart, spec);
    const { clientWidth: width, clientHeight: height } = chart.over;
    const left = Math.max(0, chart.cursor.left) + way * Math.max(2, width / 100);
    chart.setCursor({ left: Math.min(left, width), top: height / 2 });
  });
  element.addEventListener("focusout", () => tip.remove());
  return element;
}

/** A piece of a curve, as it is drawn: told apart without its colour, too. */
export function line(stroke, dash = []) {
  let at = 0;
  const stops = dash.map((length, i) => `${i % 2 ? "transparent" : stroke} ${at}px ${(at += length)}px`);
  const background = stops.length ? `repeating-linear-gradient(90deg, ${stops.join(", ")})` : stroke;
  return make("span", { class: "line", style: { background } });
}

// -- what is drawn -----------------------------------------------------------------------------------------

function plot(place, spec, width, height) {
  const series = [{}], bands = [];
  for (const { right, stroke, dash, raw, y, bands: own } of spec.lines) {
    const shared = { scale: right ? "right" : "y", stroke, spanGaps: true, points: { show: false } };
    own.forEach((_, at) => {
      series.push({ ...shared, width: 0 }, { ...shared, width: 0 });
      bands.push({ series: [series.length - 1, series.length - 2], // the upper end, the lower one
        fill: `${stroke}${["18", "1c", "20"][at]}` });
    });
    if (raw) series.push({ ...shared, width: 1, stroke: `${stroke}48` });
    series.push({ ...shared, width: 2, dash, points: { show: y.length < FEW, size: 5, fill: stroke } });
  }
  const colour = (name) => getComputedStyle(place).getPropertyValue(name);
  const grid = { stroke: colour("--line"), width: 0.5 };
  const axis = { stroke: colour("--dim"), font: "12px system-ui", grid, ticks: { show: false }, gap: 4 };
  const side = { ...axis, values: (_, splits) => ticks(splits, spec), space: 32,
    ...(spec.log && { splits: (u, at, low, high) => powers(low, high) }),
    size: (_, values) => 12 + 7 * Math.max(0, ...(values ?? []).map((text) => text?.length ?? 0)) };
  const right = spec.lines.some((line) => line.right);
  const scale = (own) => ({ distr: spec.log ? 3 : 1, range: () => reach(spec, own) });
  const chart = new uPlot({
    width, height, series, bands, legend: { show: false }, padding: [14, right ? 0 : 12, 0, 0],
    scales: { x: { time: false, range: () => spec.window }, y: scale(false),
      ...(right && { right: scale(true) }) },
    axes: [{ ...axis, ...(INCREMENTS[spec.by] && { incrs: INCREMENTS[spec.by] }), size: 26, space: 60,
      values: (_, splits) => splits.map(spec.by === "seconds" ? clock : (x) => number(x)) },
      side, ...(right ? [{ ...side, scale: "right", side: 1, grid: { show: false } }] : [])],
    cursor: {
      y: false, points: { show: false }, drag: { x: true, y: false, setScale: false },
      sync: { key: "x", setSeries: false, filters: { pub: (type) => /^mouse(move|leave)/.test(type) } },
    },
    hooks: { setCursor: [(u) => pointed(u, spec)], setSelect: [(u) => selected(u, spec)] },
  }, uPlot.join(spec.lines.map((line) => [line.x, ...line.bands.flat(), ...(line.raw ? [line.raw] : []),
    line.y])), place);
  mark(chart, spec);
  let down = 0;
  chart.over.addEventListener("mousedown", (event) => (down = event.clientX));
  chart.over.addEventListener("click", (event) => Math.abs(event.clientX - down) < 4 && chosen(chart, spec));
  return chart;
}

/** The ends of an axis: what is known, with a margin; a band reaches out of it rather than fill it. */
function reach(spec, right) {
  const lines = spec.lines.filter((line) => Boolean(line.right) === right);
  let [low, high] = ends(lines, spec.window, (line) => [line.y, line.raw ?? []]);
  if (low > high) return spec.log ? [0.1, 1] : [0, 1];
  if (spec.log) return low === high ? [low / 2, high * 2] : [low * 0.9, high * 1.1];
  const floor = low >= 0 ? 0 : -Infinity, ceiling = spec.percent && high < 1 + 1e-6 ? 1 : Infinity;
  const [least, most] = ends(lines, spec.window, (line) => line.bands.flat()), banded = least <= most;
  if (banded) {
    const room = Math.max(high - low, (most - least) * 0.6) / 2;
    [low, high] = [Math.min(low, Math.max(least, low - room)), Math.max(high, Math.min(most, high + room))];
  }
  const flat = high - low < 1e-6 * Math.abs(high); // but for rounding
  const margin = (flat ? Math.abs(high) || 1 : high - low || 1) * (banded ? 0.2 : 0.08);
  return [Math.max(floor, low - margin), Math.min(ceiling + 0.02, high + margin)];
}

/** The lowest and the highest value in the window, and beside it: lines go on to its edges. */
function ends(lines, [from, to], lists) {
  let low = Infinity, high = -Infinity;
  for (const line of lines) for (const values of lists(line)) values.forEach((v, i) => {
    if (v === null || line.x[i + 1] < from || line.x[i - 1] > to) return;
    [low, high] = [Math.min(low, v), Math.max(high, v)];
  });
  return [low, high];
}

/** Ticks with as many digits as they need: they differ, and are where they say. */
function ticks(splits, spec) {
  if (spec.log) return splits.map((v) => v && number(v));
  const size = Math.max(...splits.map(Math.abs)), apart = Math.abs(splits[1] - splits[0]) || size || 1;
  const power = Math.floor(Math.log10(size || 1));
  const [unit, name] = spec.percent && size <= 1.5 ? [0.01, "%"]
    : size >= 1e9 || size < 1e-3 ? [10 ** power, `e${power}`]
    : size >= 1e6 ? [1e6, "M"] : size >= 1e4 ? [1e3, "k"] : [1, ""];
  const right = (digits) => splits.every((v) =>
    Math.abs(Number((v / unit).toFixed(digits)) * unit - v) < apart / 50);
  const digits = [0, 1, 2, 3, 4, 5].find(right) ?? 6;
  const beyond = spec.percent && size < 1.03 ? 1 + 1e-6 : Infinity; // of a share that is at most 100%
  return splits.map((v) => v && (v > beyond ? "" : `${Number((v / unit).toFixed(digits))}${name}`));
}

/** Where a logarithmic axis has ticks; of uPlot's own there may be endlessly many. */
function powers(low, high) {
  const found = [];
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) {
    found.push(...[1, 2, 3, 4, 5, 6, 7, 8, 9].map((digit) => digit * power));
  }
  return found.filter((v) => v >= low && v <= high);
}

/** Lines over the plot, with a symbol each; of those of a kind that are close together the first one. */
function mark(chart, { marks, window: [from, to] }) {
  const apart = ((to - from) * NEAR) / chart.width, last = {};
  for (const { x, kind, text } of [...marks].sort((a, b) => a.x - b.x)) {
    if (x < from || x > to || x - last[kind] < apart) continue;
    last[kind] = x;
    const style = { left: `${(100 * (x - from)) / (to - from)}%` };
    const shown = { class: `happening ${LEVELS[kind] ?? kind}`, style, "aria-label": text };
    chart.over.append(make("span", shown, SYMBOLS[kind]));
  }
}

// -- cursor ------------------------------------------------------------------------------------------------

/** Beside the cursor: what each line has there, and what happened there. */
function pointed(u, spec) {
  const figure = u.root.closest("figure"), focused = figure === document.activeElement;
  const mine = figure.matches(":hover") || (focused && !document.querySelector("figure:hover"));
  const found = nearest(u, spec), x = u.posToVal(u.cursor.left, "x"), own = tip.dataset.title === spec.title;
  if (!mine || !(u.cursor.left >= 0) || !found.length) return own && tip.remove();
  tip.dataset.title = spec.title;
  const near = spec.marks.filter((mark) => Math.abs(u.valToPos(mark.x, "x") - u.cursor.left) < NEAR);
  const happened = [...new Set(near.map((mark) => `${SYMBOLS[mark.kind]} ${mark.text}`))];
  const step = `step ${number(found[0].line.steps[found[0].at])}`;
  const other = { step: "", seconds: ` · ${clock(x)}`, tokens: ` · ${number(x)} tokens` }[spec.by];
  const worded = spec.percent ? percent : number;
  const shown = ({ line: one, at }) => {
    const ranges = one.bands.map(([low, high]) => `${worded(low[at])} to ${worded(high[at])}`);
    const range = ranges.length ? ` (${ranges.join("; ")})` : "";
    return make("div", {}, line(one.stroke, one.dash), `${worded((one.raw ?? one.y)[at])}${range}  `,
      make("span", { class: "dim" }, one.label));
  };
  const { left, top } = u.over.getBoundingClientRect();
  tell({ clientX: left + u.cursor.left, clientY: top }, make("b", {}, step + other), ...found.map(shown),
    ...happened.slice(0, 6).map((text) => make("div", { class: "happened warn" }, text)));
}

/** Of each line its point in the window that is nearest to the cursor. */
function nearest(u, { lines, window: [from, to] }) {
  const x = u.posToVal(u.cursor.left, "x");
  return lines.flatMap((line) => {
    let at = line.x.findIndex((one) => one >= from);
    while (line.x[at + 1] <= to && line.x[at + 1] - x <= x - line.x[at]) at += 1;
    const y = u.valToPos(line.y[at], line.right ? "right" : "y");
    return line.x[at] <= to ? [{ line, at, y }] : [];
  });
}

function selected(u, spec) {
  const { left, width } = u.select;
  if (width > 4) spec.onZoom(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
  if (width) u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
}

/** A click on a step: of the line that is nearest. */
function chosen(u, spec) {
  const away = (one) => Math.abs(one.y - u.cursor.top);
  const [first] = nearest(u, spec).sort((a, b) => away(a) - away(b));
  tip.remove();
  if (first) spec.onStep(first.line, first.at);
}
