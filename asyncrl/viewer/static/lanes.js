// The lanes of the tab of time. A bar is as high as the share of its length that was busy; waits: hollow.
// Spans are those of viewer/lanes.py: [start, end, name, calls, seconds, longest, text].
import { INCREMENTS } from "view/charts.js";
import { PALETTE, byId, clock, fold, make } from "view/dom.js";

const SHORT = 0.01; // share of its process's time below which a lane is folded
const OPEN = 3; // processes of a group up to which all are shown lane by lane, and from there on the first
const HUES = [0, 1, 3, 2, 5, 4, 6, 6].map((at) => PALETTE[at]); // by meaning, as in viewer/meanings.py
const WAITS = [5, 6]; // meanings that are hollow
const TICKS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, ...INCREMENTS.seconds];

/** What is shown: `whole` and `data` are the answers for the run and for the window, `rows` those of `data`
 * by process and title, `shown` its first and last second, `stretch` what is selected, `chosen` a span. */
export const view = { whole: null, data: null, rows: new Map(), shown: [0, 1], stretch: null, chosen: null };

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
  const { chosen, data, rows } = view;
  bars(context, rows.get(canvas.dataset.lane).spans, data, x, 0, high, wide);
  if (chosen?.key !== canvas.dataset.lane) return;
  [context.strokeStyle, context.lineWidth] = [tone("text"), 2];
  context.strokeRect(x(chosen.start) - 1, 1, Math.max(x(chosen.end) - x(chosen.start), 1) + 2, high - 2);
}

function bars(context, spans, { names }, x, top, high, wide) {
  for (const [start, end, name, , took] of spans) {
    const left = Math.max(x(start), 0), right = Math.min(x(end), wide);
    if (right < 0 || left > wide) continue;
    const tall = Math.max(2, high * Math.min(1, took / (end - start || 1)));
    const gap = right - left > 4 ? 0.5 : 0;
    const [kind] = names[name], low = top + high;
    context.fillStyle = HUES[kind];
    context.fillRect(left, low - tall, Math.max(right - left - gap, 1), tall);
    const hollow = WAITS.includes(kind) && right - left > 5 && tall > 4; // told apart without colours
    if (hollow) context.clearRect(left + 2, low - tall + 2, right - left - gap - 4, tall - 4);
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
