// The lanes of the tab of time. A bar is as high as the share of its length that was busy; waits: striped.
// Spans are those of viewer/lanes.py: [start, end, name, calls, seconds, longest, text].
import { PALETTE, clock, fold, make } from "view/dom.js";

const SHORT = 0.01; // share of its process's time below which a lane is folded
const OPEN = 3; // processes of a group up to which all are shown lane by lane, and from there on the first
const HUES = [0, 1, 3, 2, 5, 4, 6, 6].map((at) => PALETTE[at]); // by meaning, as in viewer/meanings.py
const WAITS = [5, 6]; // meanings that are striped
const TICKS = [ // seconds
  ...[-3, -2, -1, 0].flatMap((power) => [1, 2, 5].map((one) => one * 10 ** power)),
  ...[10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800],
];

/** What is shown: `whole` and `data` are the answers for the run and for the window, `rows` those of `data`
 * by process and title, `shown` its first and last second, `stretch` what is selected, `chosen` a span. */
export const view = { whole: null, data: null, rows: new Map(), shown: [0, 1], stretch: null, chosen: null };

export const byId = (id) => document.getElementById(id);
export const isShort = ({ share }) => share < SHORT;
const busiest = (rows) => [...rows].sort((a, b) => b.share - a.share)[0];
export const kindOf = (process) => process.split(" ")[0];

export const sign = (kind) => make("span", {
  class: WAITS.includes(kind) ? "key waits" : "key", style: { color: HUES[kind] },
});

/** The spans of a lane, as they are told and chosen. */
export function spansOf(key) {
  const { process, spans } = view.rows.get(key);
  return spans.map(([start, end, name, calls, took, longest, text]) => {
    const [kind, title] = view.data.names[name];
    return { key, process, title, kind, start, end, calls, took, longest, text };
  });
}

// -- lanes ---------------------------------------------------------------------------------------------

/** Groups of processes, processes, lanes; those that took hardly any time are a fold of their own. */
export function lanes(processes) {
  return [...new Set(processes.map((one) => kindOf(one.title)))].flatMap((kind) => {
    const of = processes.filter((one) => kindOf(one.title) === kind);
    const made = of.map((one, at) => process(one, !at || of.length <= OPEN));
    return of.length < 2 ? made : fold(lane(`${kind}s (${of.length})`), true, ...made);
  });
}

function process({ title, rows }, open) {
  if (rows.length === 1) return lane(title, title, rows[0]);
  const [small, others] = [true, false].map((wanted) => rows.filter((row) => isShort(row) === wanted)
    .map((row) => lane(row.title, title, row)));
  return fold(lane(title, title, busiest(rows)), open, ...others,
    small.length ? fold(lane(`short (${small.length} of ${title})`), false, ...small) : null);
}

function lane(name, process, row) {
  return make("div", { class: "lane" }, make("span", { title: name }, name), row && make("canvas", {
    "data-lane": `${process}/${row.title}`, "aria-label": `${process}, ${name}`, role: "img", tabindex: 0,
    onclick: (event) => event.preventDefault(), // it is no click at the fold that it is in
  }));
}

// -- drawing -------------------------------------------------------------------------------------------

const tone = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const scale = ([from, to], wide) => (second) => ((second - from) / (to - from)) * wide;

function begin(canvas) {
  const ratio = window.devicePixelRatio || 1, context = canvas.getContext("2d");
  [canvas.width, canvas.height] = [canvas.clientWidth * ratio, canvas.clientHeight * ratio];
  context.scale(ratio, ratio);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  return context;
}

/** Waits are told from work without colours, too. */
function striped(hue) {
  const tile = make("canvas", { width: 6, height: 6 }), brush = tile.getContext("2d");
  [brush.strokeStyle, brush.lineWidth] = [hue, 2];
  for (const by of [-6, 0, 6]) {
    brush.moveTo(by - 1, 7);
    brush.lineTo(by + 7, -1);
  }
  brush.stroke();
  return brush.createPattern(tile, "repeat");
}
const INKS = HUES.map((hue, kind) => (WAITS.includes(kind) ? striped(hue) : hue));

export function paint() {
  const { data, shown, stretch, whole } = view, wide = byId("ruler")?.clientWidth;
  if (!data || !wide) return;
  const x = scale(shown, wide);
  for (const canvas of document.querySelectorAll("#lanes [data-lane]")) drawLane(canvas, x);
  ruler(begin(byId("ruler")), x, wide);
  strip(begin(byId("strip")), scale([0, whole.length], wide), wide);
  const over = (name, from, to) =>
    make("div", { class: name, style: { left: `${x(from)}px`, width: `${x(to) - x(from)}px` } });
  byId("over").replaceChildren(...data.marks.map(([at]) => over("again", at, at)),
    ...(stretch ? [over("stretch", ...stretch.span)] : []));
}

function drawLane(canvas, x) {
  const { clientWidth: wide, clientHeight: high } = canvas, context = wide && begin(canvas);
  if (!wide) return; // it is folded
  const { spans } = view.rows.get(canvas.dataset.lane), { chosen } = view;
  bars(context, spans, view.data, x, 0, high, wide);
  context.fillStyle = tone("text");
  for (const [at, [, end, , , , , text]] of spans.entries()) { // beside its bar, where there is room
    const told = text.split(/[,(]/)[0], left = x(end) + 3;
    const room = Math.min(x(spans[at + 1]?.[0] ?? Infinity), wide) - left;
    const fits = left >= 0 && room > 12 && room > context.measureText(told).width;
    if (fits) context.fillText(told, left, high / 2);
  }
  if (chosen?.key !== canvas.dataset.lane) return;
  [context.strokeStyle, context.lineWidth] = [tone("text"), 2];
  context.strokeRect(x(chosen.start) - 1, 1, Math.max(x(chosen.end) - x(chosen.start), 1) + 2, high - 2);
}

/** Bars in a part of a picture. */
function bars(context, spans, { names }, x, top, high, wide) {
  for (const [start, end, name, , took] of spans) {
    const left = Math.max(x(start), 0), right = Math.min(x(end), wide);
    if (right < 0 || left > wide) continue;
    const tall = Math.max(2, high * Math.min(1, took / (end - start || 1)));
    const gap = right - left > 4 ? 0.5 : 0;
    context.fillStyle = INKS[names[name][0]];
    context.fillRect(left, top + high - tall, Math.max(right - left - gap, 1), tall);
  }
}

/** Steps above, the time below. */
function ruler(context, x, wide) {
  const [from, to] = view.shown;
  const each = TICKS.find((one) => (to - from) / one <= wide / 90) ?? TICKS.at(-1);
  context.fillStyle = tone("dim");
  for (let at = Math.ceil(from / each) * each; at <= to; at += each) {
    context.fillRect(x(at), 29, 1, 5);
    const text = each < 1 ? `${Number(at.toFixed(3))} s` : clock(at);
    if (x(at) < wide - 34) context.fillText(text, x(at) + 3, 25);
  }
  context.fillStyle = tone("text");
  let free = 0; // where no name is yet
  for (const [step, at] of view.data.steps.filter(([, end]) => end >= from && end <= to)) {
    const left = x(at) + 3, named = left >= free && left < wide - 34, text = free ? step : `step ${step}`;
    context.fillRect(x(at), 12, 1, named ? -12 : 3);
    if (!named) continue;
    context.fillText(text, left, 5);
    free = left + context.measureText(text).width + 6;
  }
}

/** The whole run: a line for each process, and a frame around the window. */
function strip(context, x, wide) {
  const rows = view.whole.processes.slice(0, 12).map((one) => busiest(one.rows));
  const tall = context.canvas.clientHeight, high = Math.min(12, (tall - 4) / rows.length);
  rows.forEach((row, at) => bars(context, row.spans, view.whole, x, 2 + at * high, high - 1, wide));
  const [from, to] = view.shown.map(x);
  context.fillStyle = `${tone("back")}b0`;
  context.fillRect(0, 0, from, tall);
  context.fillRect(to, 0, wide - to, tall);
  context.strokeStyle = tone("accent");
  context.strokeRect(from + 0.5, 0.5, Math.max(to - from - 1, 2), tall - 1);
}
