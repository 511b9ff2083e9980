// One figure of curves, on uPlot: raw values behind smoothed ones, bands, marks, two scales, a linked cursor.
import { clock, make, number, percent } from "view/dom.js";

export const DASHES = [[], [7, 4], [2, 3], [12, 3, 2, 3], [5, 2, 1, 2]];
const SYMBOLS = { restart: "↻", resume: "◆", lost: "✕", alert: "▲", validation: "•" };
const NEAR = 9; // pixels: marks that are closer are one symbol
const INCREMENTS = {
  step: [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((n) => n * 10 ** power)),
  seconds: [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400],
};
const figures = new Map(); // by title: a figure stays while its lines do, and with it the cursor
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/**
 * `spec`: {title, note, large, percent, log, by, lines, keys, marks, window,
 * onZoom(low, high), onStep(line, at), onKey}.
 * A line: {label, stroke, dash, x, y, raw, bands: [[low, high]], right, steps}; all its lists are aligned.
 */
export function figure(spec) {
  const kind = JSON.stringify([spec.note, spec.large, spec.percent, spec.log, spec.by, spec.keys,
    spec.lines.map(shape)]);
  const old = figures.get(spec.title);
  if (old?.kind === kind) {
    old.update(spec);
    return old.element;
  }
  old?.destroy();
  const made = build(spec);
  figures.set(spec.title, { kind, ...made });
  return made.element;
}

const shape = (line) => [line.label, line.stroke, line.dash, line.right, line.bands.length,
  Boolean(line.raw), line.y.length < 40];

function build(first) {
  let spec = first, chart = null, drawn = "";
  const place = make("div", { class: "plot" });
  const element = make("figure", { class: spec.large ? "large" : "", tabindex: 0, "data-title": spec.title },
    make("figcaption", {}, make("b", {}, spec.title),
      make("span", { class: "legend" }, ...spec.keys.map((one) => key(one, spec)))),
    place, spec.note ? make("p", { class: "dim note" }, spec.note) : null);
  const fit = () => {
    const width = place.clientWidth, height = spec.large ? 260 : 180;
    if (width < 50) return; // its tab is hidden, or its group folded
    if (!chart) chart = plot(place, () => spec, width, height);
    else if (chart.width !== width) chart.setSize({ width, height });
  };
  const update = (next) => {
    spec = next;
    const now = JSON.stringify([spec.window, spec.marks,
      spec.lines.map((line) => [line.x.length, line.x.at(-1), line.y])]);
    if (chart && now !== drawn) {
      chart.setData(joined(spec), false);
      chart.setScale("x", limits(spec));
    }
    drawn = now;
  };
  update(first);
  const watch = new ResizeObserver(() => requestAnimationFrame(fit));
  watch.observe(place);
  element.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Enter: 0 };
    if (!chart || !(event.key in moves)) return;
    event.preventDefault();
    if (event.key === "Enter") return chosen(chart, spec);
    const left = Math.max(0, chart.cursor.left ?? 0) + moves[event.key] * Math.max(2,
      chart.over.clientWidth / 100);
    chart.setCursor({ left: Math.min(left, chart.over.clientWidth), top: chart.over.clientHeight / 2 });
  });
  element.addEventListener("focusout", () => tip.remove());
  return { element, update, destroy: () => (watch.disconnect(), chart?.destroy()) };
}

function key(one, spec) {
  return make("button", { class: "series", "aria-pressed": String(one.shown),
    onclick: () => spec.onKey(one.label) },
    line(one.stroke, one.dash), one.label);
}

/** A piece of a curve, as it is drawn: told apart without its colour, too. */
export function line(stroke, dash = []) {
  let at = 0;
  const stops = dash.map((length, i) => `${i % 2 ? "transparent" : stroke} ${at}px ${(at += length)}px`);
  const background = stops.length ? `repeating-linear-gradient(90deg, ${stops.join(", ")})` : stroke;
  return make("span", { class: "line", style: { background } });
}

// -- what is drawn -----------------------------------------------------------------------------------------

/** Ends of bands, raw values and the line itself, for each line, over all x. */
function joined(spec) {
  return uPlot.join(spec.lines.map((line) => [line.x, ...line.bands.flatMap(([low, high]) => [high, low]),
    ...(line.raw ? [line.raw] : []), line.y]));
}

function limits(spec) {
  const [min, max] = spec.window;
  return min === max ? { min: min - 1, max: max + 1 } : { min, max };
}

function plot(place, now, width, height) {
  const spec = now();
  const series = [{}], bands = [];
  for (const line of spec.lines) {
    const scale = line.right ? "right" : "y";
    line.bands.forEach((_, at) => {
      const edge = { scale, width: 0, points: { show: false }, spanGaps: true, stroke: line.stroke };
      series.push(edge, { ...edge });
      bands.push({ series: [series.length - 2, series.length - 1],
        fill: `${line.stroke}${["1c", "2a", "3c"][at]}` });
    });
    const few = { show: line.y.length < 40, size: 5, fill: line.stroke };
    if (line.raw) series.push({ scale, width: 1, stroke: `${line.stroke}48`, spanGaps: true,
      points: { show: false } });
    series.push({ scale, width: 2, stroke: line.stroke, dash: line.dash, spanGaps: true, points: few });
  }
  const dim = colour("--dim"), grid = { stroke: colour("--line"), width: 0.5 };
  const axis = { stroke: dim, font: "12px system-ui", grid, ticks: { show: false }, gap: 4 };
  const side = { ...axis, values: (_, splits) => ticks(splits, spec),
    size: (_, values) => 12 + 7 * longest(values), space: 32 };
  const right = spec.lines.some((line) => line.right);
  const range = (scale) => ({ distr: spec.log ? 3 : 1, range: () => reach(now(), scale) });
  const chart = new uPlot({
    width, height, series, bands, legend: { show: false }, padding: [14, right ? 0 : 12, 0, 0],
    scales: { x: { time: false, range: (_, min, max) => (min === null ? [0, 1] : [min, max]) },
      y: range(false), ...(right && { right: range(true) }) },
    axes: [{ ...axis, ...(INCREMENTS[spec.by] && { incrs: INCREMENTS[spec.by] }), size: 26, space: 60,
      values: (_, splits) => splits.map((x) => (spec.by === "seconds" ? clock(x) : number(x))) },
      side, ...(right ? [{ ...side, scale: "right", side: 1, grid: { show: false } }] : [])],
    cursor: {
      y: false, points: { show: false }, drag: { x: true, y: false, setScale: false },
      sync: { key: "x", setSeries: false, filters: { pub: (type) => type.startsWith("mousem")
        || type === "mouseleave" } },
      bind: { dblclick: () => () => now().onZoom(null) },
    },
    hooks: {
      setCursor: [(u) => pointed(u, now())],
      setSelect: [(u) => selected(u, now())],
      draw: [(u) => drawMarks(u, now())],
    },
  }, joined(spec), place);
  chart.setScale("x", limits(spec));
  let down = 0;
  chart.over.addEventListener("mousedown", (event) => (down = event.clientX));
  chart.over.addEventListener("click", (event) => Math.abs(event.clientX - down) < 4 && chosen(chart, now()));
  return chart;
}

const longest = (values) => Math.max(0, ...(values ?? []).map((text) => text?.length ?? 0));

/** The ends of an axis: what is known, with a margin; a band reaches out of it rather than fill it. */
function reach(spec, right) {
  const { min, max } = limits(spec); // uPlot itself sets x later than y
  const seen = spec.lines.filter((line) => Boolean(line.right) === right);
  const within = (line, values) => values.filter((v,
    i) => v !== null && line.x[i] >= min && line.x[i] <= max);
  const own = seen.flatMap((line) => [...within(line, line.y), ...(line.raw ? within(line, line.raw) : [])]);
  const band = seen.flatMap((line) => line.bands.flatMap(([low, high]) => [...within(line, low),
    ...within(line, high)]));
  if (!own.length) return spec.log ? [0.1, 1] : [0, 1];
  const ends = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)],
    [Infinity, -Infinity]);
  let [low, high] = ends(own);
  if (spec.log) return low === high ? [low / 2, high * 2] : [low * 0.9, high * 1.1];
  const floor = low >= 0 ? 0 : -Infinity, ceiling = spec.percent && high <= 1 ? 1 : Infinity;
  if (band.length) {
    const [least, most] = ends(band), room = Math.max(high - low, (most - least) * 0.6);
    low = Math.min(low, Math.max(least, low - room / 2));
    high = Math.max(high, Math.min(most, high + room / 2));
  }
  const flat = high - low < 1e-6 * Math.abs(high); // but for rounding
  const margin = (flat ? Math.abs(high) || 1 : high - low || 1) * (band.length ? 0.2 : 0.08);
  return [Math.max(floor, low - margin), Math.min(ceiling + 0.02, high + margin)];
}

/** Ticks with as many digits as they need: they differ, and are where they say. */
function ticks(splits, spec) {
  const size = Math.max(...splits.map(Math.abs)), apart = Math.abs(splits[1] - splits[0]) || size || 1;
  const share = spec.percent && size <= 1.5;
  const [unit, name] = share ? [0.01, "%"] : size >= 1e9 || size < 1e-3
    ? [10 ** Math.floor(Math.log10(size || 1)), null]
    : size >= 1e6 ? [1e6, "M"] : size >= 1e4 ? [1e3, "k"] : [1, ""];
  const right = (digits) => splits.every((v) =>
    Math.abs(Number((v / unit).toFixed(digits)) * unit - v) < apart / 50);
  const digits = [0, 1, 2, 3, 4, 5].find(right) ?? 6;
  const text = (v) => `${Number((v / unit).toFixed(digits))}${name ?? `e${Math.log10(unit).toFixed()}`}`;
  return splits.map((v) => (v === null ? null : v === 0 ? "0" : text(v)));
}

// -- marks -------------------------------------------------------------------------------------------------

function drawMarks(u, spec) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.lineWidth = devicePixelRatio;
  let last = null;
  u.over.querySelectorAll(".happening").forEach((one) => one.remove());
  for (const mark of [...spec.marks].sort((a, b) => a.x - b.x)) {
    const x = u.valToPos(mark.x, "x");
    if (x < -1 || x > u.over.clientWidth + 1) continue;
    const at = Math.round(bbox.left + x * devicePixelRatio);
    ctx.strokeStyle = mark.stroke;
    ctx.setLineDash(mark.kind === "validation" ? [] : [4, 4]);
    ctx.globalAlpha = 0.7;
    ctx.beginPath();
    ctx.moveTo(at, mark.kind === "validation" ? bbox.top + bbox.height - 6 * devicePixelRatio : bbox.top);
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
    if (mark.kind === "validation" || (last !== null && x - last < NEAR)) continue;
    last = x;
    const style = { left: `${x}px`, color: mark.stroke };
    u.over.append(make("span", { class: "happening", style, "aria-label": mark.text }, SYMBOLS[mark.kind]));
  }
  ctx.restore();
}

// -- cursor ------------------------------------------------------------------------------------------------

const tip = make("div", { class: "tip", id: "tip" });

/** Beside the cursor: what each line has there, and what happened there. */
function pointed(u, spec) {
  const figure = u.root.closest("figure");
  const mine = figure.matches(":hover") || (figure === document.activeElement
    && !document.querySelector("figure:hover"));
  if (!mine) return;
  if (!(u.cursor.left >= 0)) return tip.remove();
  const { x, found } = nearest(u, spec);
  const near = (mark) => Math.abs(u.valToPos(mark.x, "x") - u.cursor.left) < NEAR;
  const happened = [...new Set(spec.marks.filter(near).map((mark) => `${SYMBOLS[mark.kind]} ${mark.text}`))];
  const step = found[0] ? `step ${number(found[0].line.steps[found[0].at])}` : "";
  const other = spec.by === "step" ? "" : ` · ${spec.by === "seconds" ? clock(x) : `${number(x)} tokens`}`;
  tip.replaceChildren(make("b", {}, step + other),
    ...found.map(({ line: one, at }) => make("div", {}, line(one.stroke, one.dash),
    `${worded(one.raw ? one.raw[at] : one.y[at], spec)}${range(one, at, spec)}  `,
      make("span", { class: "dim" }, one.label))),
    ...happened.slice(0, 6).map((text) => make("div", { class: "happened" }, text)));
  document.body.append(tip);
  const box = u.over.getBoundingClientRect(), left = box.left + u.cursor.left;
  const wide = tip.offsetWidth + 16;
  Object.assign(tip.style, { left: `${left + wide > innerWidth ? left - wide : left + 16}px`,
    top: `${Math.max(4, box.top + 8)}px` });
}

const worded = (v, spec) => (spec.percent ? percent(v) : number(v));

function range(line, at, spec) {
  const texts = line.bands.map(([low, high]) => `${worded(low[at], spec)} to ${worded(high[at], spec)}`);
  return texts.length ? ` (${texts.join("; ")})` : "";
}

/** Of each line its point that is nearest to the cursor, if it is within reach. */
function nearest(u, spec) {
  const x = u.posToVal(u.cursor.left, "x");
  const found = spec.lines.map((line) => {
    let at = line.x.findIndex((one) => one >= x);
    if (at < 0) at = line.x.length - 1;
    if (at > 0 && x - line.x[at - 1] < line.x[at] - x) at -= 1;
    return { line, at, y: u.valToPos(line.y[at], line.right ? "right" : "y") };
  });
  return { x, found: found.filter(({ line }) => line.x.length) };
}

function selected(u, spec) {
  const { left, width } = u.select;
  if (width > 4) spec.onZoom(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
  if (width) u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
}

/** A click on a step: of the line that is nearest. */
function chosen(u, spec) {
  const { found } = nearest(u, spec);
  const [first] = found.sort((a, b) => Math.abs(a.y - u.cursor.top) - Math.abs(b.y - u.cursor.top));
  if (first) (tip.remove(), spec.onStep(first.line, first.at));
}
