// The tab of time: what each process did when. Above, the whole run with the window; beside, sums by name of
// the window or of a selected stretch, and the chosen span. A window is asked for again, with finer spans.
import { byId, card, clock, make, number, percent, redraw, seconds, table, tell, tip } from "view/dom.js";
import { isShort, kindOf, lanes, paint, sign, spansOf, view } from "view/lanes.js";
import { go, goLater, link } from "view/route.js";
import { ask, isFile } from "view/source.js";

const MOST = 14; // names of a stretch
const HINT = "Drag to sum a range. Click or j k: select a span. Ctrl + wheel or + −: zoom. ← →: move. 0: whole run.";

let run = null; // the number of the run that is shown

export async function show(place, route, state, current) {
  if (run !== route.run) {
    run = route.run;
    Object.assign(view, { whole: null, data: null, stretch: null, chosen: null });
    place.replaceChildren(...skeleton());
    new ResizeObserver(paint).observe(byId("lanes"));
  }
  const { step, from, to } = route, over = state.runs[run]?.ended;
  const whole = (over && view.whole) || await ask("lanes", { run });
  const data = (step || from) && !isFile ? await ask("lanes", { run, step, from, to }) : whole;
  if (!current()) return;
  if (!whole.processes.length) {
    run = null; // all is made anew once there is something
    return place.replaceChildren(make("p", { class: "dim" }, "No process has recorded a timeline."));
  }
  const rows = data.processes.flatMap(({ title, rows: of }) =>
    of.map((row) => [`${title}/${row.title}`, { process: title, ...row }]));
  Object.assign(view, { whole, data, rows: new Map(rows) });
  view.shown = isFile ? within(Number(from) || 0, Number(to) || whole.length) : data.window;
  draw();
}

function skeleton() {
  const button = (label, title, act) => make("button", { title, "aria-label": title, onclick: act }, label);
  const step = make("input", {
    placeholder: "step", size: 6, "aria-label": "go to a step",
    onchange: (event) => go({ step: event.target.value, from: null, to: null }),
  });
  const canvas = (id, text) => make("div", { class: "lane", id: `${id}-lane` },
    make("span", { class: "dim" }, text), make("canvas", { id, role: "img", "aria-label": text }));
  const strip = canvas("strip", "whole run"), place = make("div", { id: "lanes" });
  listen(strip.lastChild, place);
  return [
    make("div", { class: "bar" }, !isFile && make("label", {}, "go to ", step),
      button("−", "zoom out, key −", keys["-"]), button("+", "zoom in, key +", keys["+"]),
      button("whole run", "the whole run, key 0", keys[0]),
      make("span", { id: "time-legend", class: "legend" })),
    make("div", { class: "time" },
      card("", strip, canvas("ruler", "step, time"), place, make("p", { class: "dim" }, HINT)),
      make("div", { id: "time-panel" })),
  ];
}

function draw() {
  const shape = [...view.rows].map(([key, row]) => [key, isShort(row)]), { kinds } = view.whole;
  redraw(byId("lanes"), shape, () => [make("div", { id: "over" }), ...lanes(view.data.processes)]);
  const known = [...new Set(view.whole.names.map(([kind]) => kind))].sort();
  redraw(byId("time-legend"), known, () => known.map((kind) => make("span", {}, sign(kind), kinds[kind])));
  panel();
  paint();
}

// -- the panel -----------------------------------------------------------------------------------------

function panel() {
  const { stretch, chosen, data, whole } = view, title = data === whole ? "Whole run" : "This window";
  const told = stretch ?? { title, span: data.window, sums: data.totals };
  const marks = data.marks.map(([at, text]) => [clock(at), text]);
  redraw(byId("time-panel"), [told, chosen, marks], () => [
    chosen && spanCard(chosen),
    marks.length && card("Restarts", table(null, marks)),
    card(told.title, make("p", {}, interval(told.span)), stretch && make("div", { class: "bar" },
      make("button", { onclick: () => move(stretch.span) }, "zoom to selection"),
      make("button", { onclick: keys.Escape, title: "key Esc" }, "clear")), ...figures(told)),
  ]);
}

function interval([from, to]) {
  const fine = (at) => `${clock(Math.floor(at))}.${String(Math.floor((at * 100) % 100)).padStart(2, "0")}`;
  const told = to - from < 10 ? fine : clock;
  return `${seconds(to - from)}, from ${told(from)} to ${told(to)}`;
}

/** Sums by name, the most seconds first. Shares are of the time of all processes of a kind. */
function figures({ span, sums, note }) {
  if (!sums?.length) return [make("p", { class: "dim" }, sums ? "nothing recorded here" : note ?? "…")];
  const many = (of) => view.whole.processes.filter(({ title }) => kindOf(title) === of).length;
  const rows = sums.slice(0, MOST).map(({ of, name, kind, calls, took, longest }) => {
    const what = make("span", {}, sign(kind), name, make("span", { class: "dim" }, ` ${of}`));
    return [what, number(calls), seconds(took), busy(took, (span[1] - span[0]) * many(of)), seconds(longest)];
  });
  const more = sums.length > MOST && `and ${sums.length - MOST} more with shorter totals. `;
  const cut = span[1] - span[0] < view.whole.length
    && "Count and longest cover whole calls that overlap this range; total and share, only the time inside it. ";
  const head = ["activity", "count", "total", "share", "longest"];
  return [table(head, rows, { class: "figures" }), make("p", { class: "dim" }, more, cut, note)];
}

/** How much of a time was spent; more than all of it by several at once. */
function busy(took, of) {
  const share = took / Math.max(of, 1e-9);
  return share > 1.01 ? `${number(share)} at once` : percent(share);
}

/** What is said of a span, under the pointer and in its card. */
function facts({ start, end, calls, took, longest, text }) {
  const many = calls > 1 && `${number(calls)}: ${seconds(took)}, longest ${seconds(longest)}`;
  const told = { busy: busy(took, end - start), calls: many, details: text };
  return Object.entries(told).filter(([, value]) => value);
}

function spanCard(span) {
  const own = /^step (\d+)/.exec(span.text)?.[1];
  const step = Number(own ?? view.data.steps.find(([, at]) => at >= span.end)?.[0] ?? 0);
  const where = JSON.stringify([["step", "=", step]]);
  const links = make("span", {}, `step ${step}: `, link({ tab: "charts", step }, "charts"), ", ",
    link({ tab: "episodes", where }, "episodes"), ", ",
    link({ tab: "episodes", where, sub: "tools" }, "tools"));
  const rows = [["process", span.process], ["when", interval([span.start, span.end])], ...facts(span)];
  return card("Selected span", make("h3", { id: "chosen" }, sign(span.kind), span.title),
    table(null, step ? [...rows, ["during", links]] : rows), make("button", { onclick: near }, "zoom to selection"));
}

/** The sums of a stretch are the server's; a page in a file adds up what it has. */
async function select(span) {
  const stretch = { span, title: "Selected range", sums: null };
  view.stretch = stretch;
  panel();
  if (isFile) Object.assign(stretch, { sums: added(span), note: "Approximate: short spans are merged." });
  else await ask("lanes", { run, from: span[0], to: span[1] })
    .then(({ totals }) => (stretch.sums = totals), ({ message }) => (stretch.note = message));
  if (view.stretch === stretch) panel();
}

function added([from, to]) {
  const found = {};
  for (const one of [...view.rows.keys()].flatMap(spansOf)) {
    const { title: name, kind, start, end } = one, of = kindOf(one.process);
    if (end < from || start > to) continue;
    const sum = (found[of + name] ??= { of, name, kind, calls: 0, took: 0, longest: 0 });
    sum.calls += one.calls;
    sum.took += (one.took * (Math.min(end, to) - Math.max(start, from))) / (end - start || 1);
    sum.longest = Math.max(sum.longest, one.longest);
  }
  return Object.values(found).sort((a, b) => b.took - a.took);
}

// -- moving --------------------------------------------------------------------------------------------

function within(from, to) {
  const { length } = view.whole, width = Math.min(Math.max(to - from, 1e-3), length);
  const start = Math.min(Math.max(from, 0), length - width);
  return [start, start + width];
}

/** Show another window at once; its finer spans are asked for when nobody has moved it for a moment. */
function move([from, to]) {
  view.shown = within(from, to);
  paint();
  const [first, last] = view.shown.map((at) => at.toFixed(3));
  goLater({ step: null, from: first, to: last }, 150);
}

const width = () => view.shown[1] - view.shown[0];
const by = (share) => move(view.shown.map((at) => at + width() * share));

function zoom(factor, at = view.shown[0] + width() / 2) {
  move(view.shown.map((one) => at + (one - at) * factor));
}

/** The window around the chosen span. */
const near = () => {
  const { start, end } = view.chosen, room = Math.max((end - start) / 2, 1e-3);
  move([start - room, end + room]);
};

function choose(span) {
  view.chosen = span;
  panel();
  paint();
}

/** The next span of the lane that has the focus, or of the chosen span; or the one before. */
function next(by) {
  const key = document.activeElement.dataset.lane ?? view.chosen?.key ?? [...view.rows.keys()][0];
  const spans = spansOf(key), { start } = view.chosen?.key === key ? view.chosen : { start: NaN };
  const at = spans.findIndex((one) => Math.abs(one.start - start) < view.data.pixel);
  const one = at < 0 ? spans.find(({ end }) => end >= view.shown[0]) : spans[at + by];
  if (!one) return;
  choose(one);
  const half = width() / 2;
  if (one.end < view.shown[0] || one.start > view.shown[1]) move([one.start - half, one.start + half]);
}

export const keys = Object.fromEntries(Object.entries({
  "+": () => zoom(0.625), "=": () => zoom(0.625), "-": () => zoom(1.6), ArrowLeft: () => by(-0.2),
  ArrowRight: () => by(0.2), 0: () => go({ step: null, from: null, to: null }, true),
  j: () => next(1), k: () => next(-1), Escape: () => { view.stretch = null; choose(null); },
}).map(([key, act]) => [key, () => view.data && act()]));

// -- the pointer ---------------------------------------------------------------------------------------

/** The second under the pointer, where a picture shows those of a window. */
function secondAt(event, [from, to]) {
  const { left, width: wide } = byId("ruler").getBoundingClientRect();
  return from + Math.min(Math.max((event.clientX - left) / wide, 0), 1) * (to - from);
}

function spanAt(event) {
  const { lane } = event.target.dataset, at = secondAt(event, view.shown), slack = width() / 500;
  const near = ({ start, end }) => start - slack <= at && at <= end + slack;
  const found = lane ? spansOf(lane).filter(near) : [];
  return found.findLast(({ start, end }) => start <= at && at <= end) ?? found.at(-1) ?? null;
}

function listen(strip, place) {
  const whole = (event) => secondAt(event, [0, view.whole.length]);
  const shown = (event) => secondAt(event, view.shown);
  dragged(strip, whole, (span) => { view.shown = within(...span); paint(); }, move,
    (event) => move([whole(event) - width() / 2, whole(event) + width() / 2]));
  dragged(place, shown, (span) => { view.stretch = { span }; paint(); }, select,
    (event) => choose(spanAt(event)));
  place.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, shown(event));
  }, { passive: false });
  place.addEventListener("toggle", paint, true);
  place.addEventListener("pointermove", (event) => {
    const span = event.buttons ? null : spanAt(event);
    if (!span) return tip.remove();
    const told = facts(span).map(([what, text]) => `${what} ${text}`);
    tell(event, [span.title, seconds(span.end - span.start), ...told].join("\n"));
  });
  place.addEventListener("pointerleave", () => tip.remove());
}

/** Calls `moving` while a stretch is dragged, `done` with it; a press without a drag is a `click`. */
function dragged(place, second, moving, done, click) {
  let from = null; // how it began
  const span = (event) => [second(from), second(event)].sort((a, b) => a - b);
  const far = (event) => Math.abs(event.clientX - from.clientX) > 3;
  place.addEventListener("pointerdown", (event) => { from = event.target.matches("canvas") && event; });
  place.addEventListener("pointermove", (event) => {
    if (!from || !far(event)) return;
    place.setPointerCapture(event.pointerId);
    moving(span(event));
  });
  place.addEventListener("pointerup", (event) => {
    if (from) far(event) ? done(span(event)) : click(event);
    from = null;
  });
  place.addEventListener("pointercancel", () => { from = null; });
}
