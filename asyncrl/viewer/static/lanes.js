// The lanes of the tab of time. A bar is as high as the share of its length that was busy; waits: striped.
// Spans are those of a LaneWindow of viewer/lanes.py: [start, end, name, calls, seconds, longest, text].
import { PALETTE, clock, make } from "view/dom.js";

const ROW = 20, HEAD = 38, STRIP = 46; // pixels
const SHORT = 0.01; // share of its process's time below which a lane is folded
const OPEN = 3; // processes of a group up to which all are shown lane by lane, and from there on the first
const HUES = [0, 1, 3, 2, 5, 4, 6, 6].map((at) => PALETTE[at]); // by meaning, as in viewer/meanings.py
const WAITS = [5, 6]; // meanings that are striped
const HELD = "weights held"; // a lane of what an engine has, not of what it does
const GROUPS = { coordinator: "Coordinator", trainer: "Trainer ranks", worker: "Workers", engine: "Engines" };
const TICKS = [
  ...[1, 2, 5, 10, 20, 50, 100, 200, 500].map((one) => one / 1000),
  ...[1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800],
];

/** What is shown: `whole` and `data` are the answers for the run and for the window, `shown` its first and
 * last second, `stretch` the selected seconds, `chosen` a span and where it is, `lane` the line that the keys
 * are on, `turned` the folds that are not as they begin, `hidden` the meanings that are not drawn. */
export const view = {
  whole: null, data: null, shown: [0, 1], lines: [], stretch: null, chosen: null, lane: "", turned: new Set(),
  hidden: new Set(),
};

export const byId = (id) => document.getElementById(id);
export const length = () => Math.max(view.whole.end - view.whole.start, 1e-3);
export const isHeld = (row) => row.title.startsWith(HELD);
export const nameOf = (line) => `${line.process} ${line.row?.title}`;
/** Times are rounded to less than a pixel. */
export function isSame(a, b) {
  return nameOf(a.line) === nameOf(b.line) && Math.abs(a.start - b.start) < view.data.pixel;
}
export const kindOf = (process) => process.split(" ")[0];

const width = () => Math.max(byId("lanes-canvas").clientWidth, 1);
const offset = () => view.data.from - view.data.start;
const x = (second) => ((second - view.shown[0]) / (view.shown[1] - view.shown[0])) * width();
const tone = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// -- lines ---------------------------------------------------------------------------------------------

const isOpen = (key, begins) => begins !== view.turned.has(key);
const busiest = (rows) => rows.filter((row) => !isHeld(row)).sort((a, b) => b.share - a.share)[0] ?? rows[0];

/** Groups of processes, processes, lanes: { title, level; of a lane process, row; of a fold key, open }. */
export function layout(processes) {
  const kinds = [...new Set(processes.map((one) => kindOf(one.title)))];
  return kinds.flatMap((kind) => {
    const of = processes.filter((one) => kindOf(one.title) === kind), many = of.length > 1;
    const open = isOpen(kind, true), title = `${GROUPS[kind] ?? kind} (${of.length})`;
    const head = many ? [{ title, key: kind, open, level: 0 }] : [];
    if (many && !open) return head;
    return [...head, ...of.flatMap((one, at) => process(one, !at || of.length <= OPEN, Number(many)))];
  });
}

/** A process, and its lanes unless it is folded; those that took hardly any time are a fold of their own. */
function process({ title, rows }, begins, level) {
  const lane = (row, more) => ({ title: row.title, process: title, row, level: level + more });
  if (rows.length === 1) return [{ ...lane(rows[0], 0), title }];
  if (!isOpen(title, begins)) return [{ ...lane(busiest(rows), 0), title, key: title, open: false }];
  const small = rows.filter((row) => row.share < SHORT && !isHeld(row));
  const key = `${title}/short`, open = isOpen(key, false);
  const short = `short (${small.length} ${small.length > 1 ? "lanes" : "lane"})`;
  return [
    { title, key: title, open: true, level },
    ...rows.filter((row) => !small.includes(row)).map((row) => lane(row, 1)),
    ...(small.length ? [{ title: short, key, open, level: level + 1 }] : []),
    ...(open ? small.map((row) => lane(row, 2)) : []),
  ];
}

// -- drawing -------------------------------------------------------------------------------------------

/** The share of its length that a span was busy; an event, which has no length, is a line. */
const shareOf = ([start, end, , , took]) => (end > start ? Math.min(1, took / (end - start)) : 1);

export function sign(kind) {
  const waits = WAITS.includes(kind);
  return make("span", { class: waits ? "key waits" : "key", style: { color: HUES[kind] } });
}

function begin(canvas, height) {
  const ratio = window.devicePixelRatio || 1, context = canvas.getContext("2d");
  canvas.style.height = `${height}px`;
  [canvas.width, canvas.height] = [canvas.clientWidth * ratio, height * ratio];
  context.scale(ratio, ratio);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  return context;
}

/** Waits have stripes: they are told from work without colours, too. */
const stripes = new Map();
function ink(context, kind) {
  if (!WAITS.includes(kind)) return HUES[kind];
  if (!stripes.has(kind)) {
    const tile = make("canvas", { width: 6, height: 6 }), brush = tile.getContext("2d");
    [brush.strokeStyle, brush.lineWidth] = [HUES[kind], 2];
    for (const by of [-6, 0, 6]) {
      brush.moveTo(by - 1, 7);
      brush.lineTo(by + 7, -1);
    }
    brush.stroke();
    stripes.set(kind, context.createPattern(tile, "repeat"));
  }
  return stripes.get(kind);
}

export function paint() {
  if (!view.data || !byId("lanes-canvas")?.clientWidth) return;
  const height = HEAD + view.lines.length * ROW, context = begin(byId("lanes-canvas"), height);
  view.lines.forEach((line, at) => {
    const top = HEAD + at * ROW;
    if (!line.row) return;
    context.fillStyle = tone(view.lane === nameOf(line) ? "soft" : "raised");
    context.fillRect(0, top + 2, width(), ROW - 4);
    isHeld(line.row) ? versions(context, line, top) : bars(context, line, top);
  });
  ruler(context, height);
  if (view.stretch) {
    const [from, to] = view.stretch.span.map(x);
    [context.fillStyle, context.strokeStyle] = [`${PALETTE[0]}22`, tone("accent")];
    context.fillRect(from, HEAD, to - from, height - HEAD);
    context.strokeRect(from, HEAD, to - from, height - HEAD - 1);
  }
  strip();
}

function bars(context, line, top) {
  for (const span of line.row.spans) {
    const start = span[0] + offset(), end = span[1] + offset(), kind = view.data.meanings[span[2]];
    if (end < view.shown[0] || start > view.shown[1] || view.hidden.has(kind)) continue;
    const left = Math.max(x(start), 0), right = Math.min(x(end), width());
    const high = Math.max(2, shareOf(span) * (ROW - 4)), gap = right - left > 4 ? 0.5 : 0;
    const wide = Math.max(right - left - gap, 1);
    context.fillStyle = ink(context, kind);
    context.fillRect(left, top + ROW - 2 - high, wide, high);
    if (!view.chosen || !isSame({ line, start }, view.chosen)) continue;
    [context.strokeStyle, context.lineWidth] = [tone("text"), 2];
    context.strokeRect(left - 1, top + 1, wide + 2, ROW - 2);
    context.lineWidth = 1;
  }
}

/** The versions that an engine holds, one after another: boxes with their names. */
function versions(context, line, top) {
  [context.strokeStyle, context.fillStyle] = [HUES[4], tone("text")];
  for (const [start, end, , , , , text] of line.row.spans) {
    const left = Math.max(x(start + offset()), 0), right = Math.min(x(end + offset()), width());
    if (right < 0 || left > width()) continue;
    if (right - left > 3) context.strokeRect(left + 0.5, top + 4.5, right - left - 1, ROW - 9);
    else context.fillRect(left, top + ROW / 2, Math.max(right - left, 1), 1);
    const name = text.split(" ")[0];
    if (right - left > 8 + 7 * name.length) context.fillText(name, left + 4, top + ROW / 2);
  }
}

/** Steps above, the time below, and marks where something began again. */
function ruler(context, height) {
  const [from, to] = view.shown, most = Math.max(1, width() / 90);
  const each = TICKS.find((one) => (to - from) / one <= most) ?? TICKS.at(-1);
  context.fillStyle = tone("dim");
  for (let at = Math.ceil(from / each) * each; at <= to; at += each) {
    context.fillRect(x(at), HEAD - 5, 1, 5);
    beside(context, each < 1 ? `${Number(at.toFixed(3))} s` : clock(at), x(at), HEAD - 11);
  }
  const steps = view.data.steps.filter(([, at]) => at >= from && at <= to);
  const apart = steps.length > 1 ? (steps.at(-1)[0] - steps[0][0]) / (width() / 52) : 1;
  const power = 10 ** Math.floor(Math.log10(Math.max(1, apart)));
  const every = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= apart);
  context.fillStyle = tone("text");
  let free = 0; // where no name is yet
  for (const [number, [step, at]] of steps.entries()) {
    const before = number ? steps[number - 1][0] : step - 1;
    const named = Math.floor(step / every) > Math.floor(before / every) && x(at) >= free;
    context.fillRect(x(at), 0, 1, named ? 7 : 3);
    if (named) free = beside(context, free ? step : `step ${step}`, x(at), 8) + 8;
  }
  context.fillStyle = tone("bad");
  for (const [at] of view.data.marks) {
    context.fillRect(x(at), 8, 1, height);
    context.fillText("▼", x(at) - 4.5, 8);
  }
}

/** A text to the right of a tick, or to its left where the picture ends. Returns where it ends. */
function beside(context, text, left, top) {
  const wide = context.measureText(text).width;
  const place = left + 3 + wide > width() ? left - 3 - wide : left + 3;
  context.fillText(text, place, top);
  return place + wide;
}

/** The whole run: a line for each process, and a frame around the window. */
function strip() {
  const canvas = byId("strip"), context = begin(canvas, STRIP), wide = canvas.clientWidth;
  const place = (at) => (at / length()) * wide;
  const rows = view.whole.processes.slice(0, 12).map((one) => busiest(one.rows));
  const high = Math.min(12, (STRIP - 4) / Math.max(rows.length, 1));
  rows.forEach((row, at) => row.spans.forEach((span) => {
    const kind = view.whole.meanings[span[2]], size = Math.max(1, shareOf(span) * (high - 1));
    if (view.hidden.has(kind)) return;
    context.fillStyle = ink(context, kind);
    context.fillRect(place(span[0]), 2 + (at + 1) * high - size, Math.max(place(span[1] - span[0]), 1), size);
  }));
  const [from, to] = view.shown.map(place);
  context.fillStyle = `${tone("back")}b0`;
  context.fillRect(0, 0, from, STRIP);
  context.fillRect(to, 0, wide - to, STRIP);
  context.strokeStyle = tone("accent");
  context.strokeRect(from + 0.5, 0.5, Math.max(to - from - 1, 2), STRIP - 1);
}

// -- what is under the pointer -------------------------------------------------------------------------

export function secondAt(event) {
  return view.shown[0] + (event.offsetX / width()) * (view.shown[1] - view.shown[0]);
}

/** The spans of a line that are drawn, with their names: what a chosen span is. */
export const spansOf = (line) => line.row.spans.map((span) => ({
  line, span, start: span[0] + offset(), end: span[1] + offset(),
  name: view.data.names[span[2]], kind: view.data.meanings[span[2]],
})).filter(({ kind }) => !view.hidden.has(kind));

export function spanAt(event) {
  const line = view.lines[Math.floor((event.offsetY - HEAD) / ROW)], at = secondAt(event);
  const slack = (2 * (view.shown[1] - view.shown[0])) / width();
  const near = ({ start, end }) => start - slack <= at && at <= end + slack;
  const inside = ({ start, end }) => start <= at && at <= end;
  if (!line?.row) return null;
  const found = spansOf(line).filter(near);
  return found.findLast(inside) ?? found.at(-1) ?? null;
}
