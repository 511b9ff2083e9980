// The tab of time: what each process did when. Above, the whole run with the window; beside, sums by name of
// the window or of a selected stretch, and the chosen span. A window is asked for again, with finer spans.
import { card, clock, make, number, percent, redraw, seconds, table } from "view/dom.js";
import {
  byId, isHeld, isSame, kindOf, layout, length, nameOf, paint, secondAt, sign, spanAt, spansOf, view,
} from "view/lanes.js";
import { go, link } from "view/route.js";
import { ask, isFile } from "view/source.js";

const PAUSE = 150; // milliseconds without a change before the spans of a window are asked for
const MOST = 14; // names of a stretch

let run = null; // the number of the run that is shown
let asked = 0; // answers of earlier questions are not drawn
let wanted = ""; // the window of the address
let timer = 0;

export async function show(place, route, state, current) {
  if (run !== route.run) {
    run = route.run;
    Object.assign(view, { whole: null, data: null, stretch: null, chosen: null });
    place.replaceChildren(...skeleton());
    new ResizeObserver(paint).observe(byId("lanes"));
  }
  const asks = route.step ? { step: route.step } : route.from ? { from: route.from, to: route.to } : {};
  const key = JSON.stringify(asks), goesOn = !state.runs[run]?.ended, mine = ++asked;
  if (view.data && key === wanted && !goesOn) return paint();
  if (!view.whole || goesOn) view.whole = await ask("lanes", { run });
  if (!view.whole.processes.length) {
    run = null; // all is made anew once there is something
    return place.replaceChildren(make("p", { class: "dim" }, "No process has recorded anything yet."));
  }
  const answer = key === "{}" || isFile ? view.whole : await ask("lanes", { run, ...asks });
  if (mine !== asked || !current()) return;
  [view.data, wanted] = [answer, key];
  view.shown = [answer.from - answer.start, answer.to - answer.start];
  if (isFile) view.shown = inFile(route);
  draw();
}

/** A page in a file has the whole run only: a step's window is that from the end of the one before. */
function inFile({ step, from, to }) {
  const { steps } = view.whole, at = steps.findIndex(([one]) => one >= Number(step));
  if (at < 0) return within(Number(from) || 0, Number(to) || length());
  return within(steps[at - 1]?.[1] ?? 0, steps[at][1]);
}

function skeleton() {
  const button = (label, title, act) => make("button", { title, "aria-label": title, onclick: act }, label);
  const canvas = (id, label) => make("canvas", { id, tabindex: 0, role: "img", "aria-label": label });
  const step = make("input", {
    id: "time-step", placeholder: "step", size: 6, "aria-label": "go to a step",
    onchange: (event) => go({ step: event.target.value, from: null, to: null }),
  });
  const strip = canvas("strip", "The whole run. Drag to choose a window");
  const lanes = canvas("lanes-canvas", "What each process did when. Up, down: a lane; j, k: a span in it");
  listen(strip, lanes);
  const told = "Drag: sums of a stretch. Click: a span. Ctrl + wheel, + −: zoom. ← →: move. 0: whole run.";
  return [
    make("div", { class: "bar" }, make("label", {}, "go to ", step),
      button("−", "zoom out, key −", keys["-"]), button("+", "zoom in, key +", keys["+"]),
      button("whole run", "the whole run, key 0", keys[0]), make("span", { id: "time-legend" })),
    make("div", { class: "time" },
      make("div", { class: "card" },
        make("div", { class: "lanes" }, make("span", { class: "dim" }, "the whole run"), strip),
        make("div", { id: "lanes", class: "lanes" }, make("div", { id: "lane-labels" }), lanes),
        make("p", { class: "dim" }, told)),
      make("div", { id: "time-panel" })),
    make("div", { class: "tip", id: "time-tip", hidden: "" }),
  ];
}

function draw() {
  view.lines = layout(view.data.processes);
  const labels = view.lines.map(({ row, ...label }) => label);
  redraw(byId("lane-labels"), labels, () => labels.map(label));
  const { kinds } = view.whole, present = [...new Set(view.whole.meanings)].sort();
  redraw(byId("time-legend"), [present, [...view.hidden]], () => present.map((kind) => make("button", {
    id: `meaning-${kind}`, "aria-pressed": String(!view.hidden.has(kind)), title: "show or hide",
    onclick: () => turn(view.hidden, kind),
  }, sign(kind), kinds[kind])));
  panel();
  paint();
}

function label({ title, key, open, level, process }, at) {
  const style = { paddingLeft: `${level * 14 + (key ? 0 : 14)}px` };
  const attributes = { id: `lane-${at}`, title: process ? `${title}, ${process}` : title, style };
  if (!key) return make("div", attributes, title);
  const act = () => turn(view.turned, key), arrow = open ? "▾" : "▸";
  return make("button", { ...attributes, "aria-expanded": String(open), onclick: act }, `${arrow} ${title}`);
}

function turn(set, key) {
  if (!set.delete(key)) set.add(key);
  draw();
}

// -- the panel -----------------------------------------------------------------------------------------

function panel() {
  const { stretch, chosen, data, shown } = view;
  const title = shown[1] - shown[0] >= length() * 0.999 ? "Whole run" : "This window";
  const told = stretch ?? { span: shown, sums: sumsOf(data), title };
  const marks = data.marks.map(([at, text]) => [clock(at), text]);
  redraw(byId("time-panel"), [told, chosen?.line.process, chosen?.span, marks], () => [
    chosen && spanCard(chosen),
    marks.length ? card("Began again", table(null, marks)) : null,
    card(told.title ?? "Selected", make("p", {}, interval(told.span), ...buttons()), ...figures(told)),
  ].filter(Boolean));
}

const sumsOf = (answer) => answer.totals.map(([of, at, calls, took, longest]) =>
  ({ of, name: answer.names[at], kind: answer.meanings[at], calls, took, longest }));

function interval([from, to]) {
  const tenth = to - from < 60 ? (at) => `.${Math.floor(10 * (at % 1))}` : () => "";
  const [first, last] = [from, to].map((at) => clock(Math.floor(at)) + tenth(at));
  return `${seconds(to - from)}, from ${first} to ${last}`;
}

const buttons = () => (view.stretch ? [
  " ", make("button", { id: "zoom-to", onclick: () => move(view.stretch.span, 0) }, "zoom to it"),
  " ", make("button", { id: "no-stretch", onclick: keys.Escape, title: "key Esc" }, "clear"),
] : []);

/** What the trainer did, which does one thing at a time; then all sums, the most seconds first. Shares are of
 * the time of all processes of a kind. */
function figures({ span, sums, note }) {
  if (!sums?.length) return [make("p", { class: "dim" }, sums ? "nothing was recorded here" : "…")];
  const many = (of) => view.whole.processes.filter((one) => kindOf(one.title) === of).length || 1;
  const time = (of) => Math.max((span[1] - span[0]) * many(of), 1e-9);
  const trained = sums.filter(({ of }) => of === "trainer");
  const parts = view.whole.kinds.map((name, kind) => {
    const took = trained.reduce((all, one) => all + (one.kind === kind ? one.took : 0), 0);
    return { name, kind, share: took / time("trainer") };
  }).filter(({ share }) => share >= 0.02).sort((a, b) => b.share - a.share);
  const told = parts.map(({ name, kind, share }, at) =>
    make("span", {}, sign(kind), `${percent(share)} ${name}${at < parts.length - 1 ? "," : ""}`));
  const rows = sums.slice(0, MOST).map(({ of, name, kind, calls, took, longest }) => {
    const what = make("span", {}, sign(kind), name, make("span", { class: "dim" }, ` ${of}`));
    return [what, number(calls), seconds(took), busy(took, time(of)), seconds(longest)];
  });
  const more = sums.length > MOST ? `and ${sums.length - MOST} more, that took less` : "";
  return [
    told.length ? make("p", { class: "headline" }, "The trainer: ", ...told) : null,
    table(["what", "count", "total", "share", "longest"], rows, { class: "figures" }),
    make("p", { class: "dim" }, [more, note].filter(Boolean).join("; ")),
  ];
}

/** How much of a time was spent; more than all of it by several at once. */
function busy(took, of) {
  const share = took / of;
  return share > 1.01 ? `${number(share)} at once` : percent(share);
}

/** What is said of a span, under the pointer and in its card. */
function facts({ span: [start, end, , calls, took, longest, text] }) {
  const many = `${number(calls)}: ${seconds(took)}, the longest ${seconds(longest)}`;
  const found = { busy: end > start && busy(took, end - start), calls: calls > 1 && many, details: text };
  return Object.entries(found).filter(([, value]) => value);
}

function spanCard(found) {
  const { line, name, kind, start, end, span } = found, own = /^step (\d+)/.exec(span[6])?.[1];
  const step = Number(own ?? view.data.steps.find(([, at]) => at >= end)?.[0] ?? 0);
  const where = JSON.stringify([["step", "=", step]]);
  const links = make("span", {}, `step ${step}: `, link({ tab: "charts", step }, "charts"), ", ",
    link({ tab: "episodes", where }, "episodes"));
  const rows = [["process", line.process], ["when", interval([start, end])], ...facts(found)];
  return card("Chosen", make("h3", { id: "chosen" }, sign(kind), name),
    table(null, step ? [...rows, ["during", links]] : rows),
    make("button", { id: "zoom-span", title: "key Enter on the lanes", onclick: near }, "zoom to it"));
}

/** The sums of a stretch are the server's; a page in a file adds up what it has. */
async function select(span) {
  const stretch = { span, sums: null, note: "" };
  view.stretch = stretch;
  panel();
  paint();
  if (isFile) Object.assign(stretch, { sums: added(span), note: "about: short spans are merged in a file" });
  else stretch.sums = sumsOf(await ask("lanes", { run, from: span[0], to: span[1] }));
  if (view.stretch === stretch) panel();
}

function added([from, to]) {
  const found = new Map();
  const lines = view.whole.processes.flatMap(({ title, rows }) => rows.map((row) => ({ title, row })));
  for (const one of lines.filter(({ row }) => !isHeld(row)).flatMap(spansOf)) {
    const { name, kind, start, end, span } = one, of = kindOf(one.line.title);
    const part = end > start ? (Math.min(end, to) - Math.max(start, from)) / (end - start) : 1;
    if (end < from || start > to) continue;
    const sum = found.get(of + name) ?? { of, name, kind, calls: 0, took: 0, longest: 0 };
    sum.calls += span[3];
    sum.took += span[4] * part;
    sum.longest = Math.max(sum.longest, span[5]);
    found.set(of + name, sum);
  }
  return [...found.values()].sort((a, b) => b.took - a.took);
}

// -- moving --------------------------------------------------------------------------------------------

function within(from, to) {
  const width = Math.min(Math.max(to - from, 1e-3), length());
  const start = Math.min(Math.max(from, 0), length() - width);
  return [start, start + width];
}

/** Show another window at once; its finer spans are asked for when nobody has moved it for a moment. */
function move([from, to], pause = PAUSE) {
  view.shown = within(from, to);
  panel();
  paint();
  clearTimeout(timer);
  timer = setTimeout(() => {
    const [first, last] = view.shown, all = last - first >= length() * 0.999;
    go({ step: null, from: all ? null : first.toFixed(3), to: all ? null : last.toFixed(3) }, true);
  }, pause);
}

function zoom(factor, at = (view.shown[0] + view.shown[1]) / 2) {
  const [from, to] = view.shown;
  move([at - (at - from) * factor, at + (to - at) * factor]);
}

const by = (share) => {
  const step = (view.shown[1] - view.shown[0]) * share;
  move([view.shown[0] + step, view.shown[1] + step]);
};

/** The window around the chosen span. */
const near = () => {
  const { start, end } = view.chosen, room = Math.max((end - start) / 2, 1e-3);
  move([start - room, end + room], 0);
};

function choose(found) {
  view.chosen = found;
  if (found) view.lane = nameOf(found.line);
  panel();
  paint();
}

/** The next span of the lane that the keys are on, or the one before. */
function next(by) {
  const rows = view.lines.filter((line) => line.row);
  const line = rows.find((one) => nameOf(one) === view.lane) ?? rows[0];
  const found = line ? spansOf(line) : [], same = view.chosen && nameOf(view.chosen.line) === nameOf(line);
  const at = same ? found.findIndex((one) => isSame(one, view.chosen)) + by : -1;
  const one = found[same ? at : found.findIndex(({ end }) => end >= view.shown[0])];
  if (!one) return;
  choose(one);
  const half = (view.shown[1] - view.shown[0]) / 2;
  if (one.end < view.shown[0] || one.start > view.shown[1]) move([one.start - half, one.start + half]);
}

function lane(by) {
  const rows = view.lines.filter((line) => line.row).map(nameOf), at = rows.indexOf(view.lane);
  view.lane = rows[Math.min(Math.max(at + by, 0), rows.length - 1)] ?? "";
  paint();
}

export const keys = {
  "+": () => zoom(0.625), "=": () => zoom(0.625), "-": () => zoom(1.6), 0: () => move([0, length()], 0),
  ArrowLeft: () => by(-0.2), ArrowRight: () => by(0.2), j: () => next(1), k: () => next(-1),
  Escape: () => { view.stretch = null; choose(null); },
};

// -- the pointer ---------------------------------------------------------------------------------------

function listen(strip, lanes) {
  const place = (event) => (event.offsetX / Math.max(strip.clientWidth, 1)) * length();
  const half = () => (view.shown[1] - view.shown[0]) / 2;
  dragged(strip, place, (span) => { view.shown = within(...span); paint(); }, (span) => move(span, 0),
    (event) => move([place(event) - half(), place(event) + half()], 0));
  dragged(lanes, secondAt, (span) => { view.stretch = { span, sums: null }; paint(); }, select,
    (event) => choose(spanAt(event)));
  lanes.addEventListener("wheel", (event) => {
    const zooms = event.ctrlKey || event.metaKey;
    if (!zooms && !event.deltaX) return; // the page scrolls
    event.preventDefault();
    zooms ? zoom(event.deltaY > 0 ? 1.25 : 0.8, secondAt(event)) : by(event.deltaX / 1000);
  }, { passive: false });
  lanes.addEventListener("pointermove", (event) => {
    const found = event.buttons ? null : spanAt(event), tip = byId("time-tip");
    tip.hidden = !found;
    if (!found) return;
    const told = facts(found).map(([what, text]) => `${what} ${text}`);
    tip.textContent = [found.name, seconds(found.end - found.start), ...told].join("\n");
    tip.style.left = `${Math.max(0, Math.min(event.clientX + 12, innerWidth - 300))}px`;
    tip.style.top = `${event.clientY + 12}px`;
  });
  lanes.addEventListener("pointerleave", () => { byId("time-tip").hidden = true; });
  const own = { ArrowUp: () => lane(-1), ArrowDown: () => lane(1), Enter: () => view.chosen && near() };
  lanes.addEventListener("keydown", (event) => {
    if (!own[event.key]) return;
    event.preventDefault();
    own[event.key]();
  });
}

/** Calls `moving` while a stretch is dragged, `done` with it; a press without a drag is a `click`. */
function dragged(canvas, second, moving, done, click) {
  let from = null, place = 0, far = false;
  canvas.addEventListener("pointerdown", (event) => {
    [from, place, far] = [second(event), event.clientX, false];
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (from === null) return;
    far ||= Math.abs(event.clientX - place) > 3;
    if (far) moving([from, second(event)].sort((a, b) => a - b));
  });
  canvas.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const span = [from, second(event)].map((at) => Math.min(Math.max(at, 0), length())).sort((a, b) => a - b);
    from = null;
    far ? done(span) : click(event);
  });
  canvas.addEventListener("pointercancel", () => { from = null; });
}
