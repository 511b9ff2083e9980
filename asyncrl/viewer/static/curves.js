// The tab of curves: what a run earns, how old its tokens are, how fast it is; with what happened when.
import { DASHES, figure, line } from "view/charts.js";
import { MEANINGS, PALETTE, byId, fold, hue, make, number, redraw } from "view/dom.js";
import { go, goLater } from "view/route.js";
import { ask, isFile } from "view/source.js";

const X = { step: "step", tokens: "tokens trained", seconds: "time" };
const SMOOTH = 0.6; // share that the past has
const FEW = 20; // points from which on a curve is smoothed
const APART = 20; // times: runs whose scales differ so have scales of their own
const MORE = 12; // metrics that are in no chart and whose names fit

const known = new Map(); // by run: its answer, and that of the stretch that was looked at last
let answers = [], runs = [];

export const keys = { 0: () => go({ zoom: null }) };

export async function show(place, now, state, current) {
  const by = X[now.by] ? now.by : "step", zoom = now.zoom?.split("~").map(Number);
  const found = await Promise.all(state.runs.map((run, at) => closer(run, at, by, zoom)));
  if (!current() || document.querySelector(".plot:active")) return; // a stretch is being dragged over
  [answers, runs] = [found, state.runs];
  if (!place.firstChild) {
    place.append(make("div", { id: "chart-bar", class: "bar" }), make("div", { id: "figures" }));
  }
  const settings = settingsOf(state, now.seeds !== "apart"), out = (now.out ?? "").split(",");
  const view = { now, by, settings, window: zoom ?? whole(by), out };
  const drawn = [now, settings, answers.map((one) => one.number)];
  redraw(byId("chart-bar"), [...drawn, { ...now, smooth: null }].slice(1), () =>
    bar(view, settingsOf(state).length < runs.length));
  redraw(byId("figures"), drawn, () => figures(view));
}

/** Of a long run that was thinned: the stretch that is looked at, with more of its steps. */
async function closer(run, at, by, zoom) {
  const every = await answer(run, at);
  if (!zoom || isFile || every.steps <= every.step.length) return every;
  return answer(run, at, { by, from: zoom[0], to: zoom[1] });
}

/** Asked again once there is a thousandth more: a long run is not drawn anew at each step. */
async function answer(run, at, stretch = null) {
  const place = `${at}${stretch ? " closer" : ""}`, old = known.get(place), name = JSON.stringify(stretch);
  const same = old?.name === name && old.ended === run.ended && run.rows - old.rows < old.rows / 1000;
  if (old && (isFile || same)) return old.answer;
  const found = { ...(await ask("rows", { run: at, ...stretch })), number: (old?.answer.number ?? 0) + 1 };
  known.set(place, { name, rows: run.rows, ended: run.ended, answer: found });
  return found;
}

/** Runs whose configurations differ by their seeds alone are one setting. */
export function settingsOf(state, together = true) {
  const keys = Object.entries(state.differences).filter(([key]) => !/(^|\.)seed$/.test(key));
  const found = new Map();
  state.runs.forEach((run, at) => {
    const setting = together ? JSON.stringify(keys.map(([, values]) => values[at])) : at;
    found.set(setting, [...(found.get(setting) ?? []), at]);
  });
  return [...found.values()].map((of) => {
    const names = of.map((at) => state.runs[at].name);
    const name = of.length > 1 ? `${of.length} seeds: ${names[0]} …` : names[0];
    return { of, names, name, hue: hue(of[0]) };
  });
}

function whole(by) {
  const [low, high] = answers.flatMap((one) => one[by]).filter((x) => x !== null).reduce(
    ([a, b], x) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]);
  return low < high ? [low, high] : [low - 1, high + 1];
}

// -- the page ----------------------------------------------------------------------------------------------

function bar({ now, by, settings, out }, seeds) {
  const smoothed = ({ target }) =>
    goLater({ smooth: Number(target.value) === SMOOTH ? null : target.value }, 60);
  const button = (id, text, on, changes, title = null) => make("button",
    { id, title, "aria-pressed": String(Boolean(on)), onclick: () => go(changes, true) }, text);
  return [
    make("span", { class: "bar", role: "group", "aria-label": "x axis" }, ...Object.entries(X).map(([key,
      text]) => button(`by-${key}`, text, by === key, { by: key === "step" ? null : key, zoom: null }))),
    make("label", { class: "dim", title: "weight of past values; raw values stay visible as a faint line" }, "smoothing ",
      make("input", { id: "smooth", type: "range", min: 0, max: 0.98, step: 0.02, value: now.smooth ?? SMOOTH,
        oninput: smoothed })),
    button("log", "log", now.log, { log: now.log ? null : 1 }),
    seeds && button("seeds", "combine seeds", !now.seeds, { seeds: now.seeds ? null : "apart" }),
    make("input", { id: "panels", list: "panel-names", placeholder: "filter panels: entropy, lag",
      value: now.panels, "aria-label": "filter panels by name",
      onchange: (event) => go({ panels: event.target.value.trim() }) }),
    make("datalist", { id: "panel-names" }, ...columns().map((value) => make("option", { value }))),
    button("marks", "marks", !now.marks, { marks: now.marks ? null : "off" },
      "↻ restarts, ◆ changed keys, ✕ lost workers, ▲ alerts, | validations"),
    now.zoom && make("button", { id: "whole", title: "key 0", onclick: keys[0] }, "all steps"),
    runs.length > 1 && make("span", { class: "legend" }, ...settings.map((one) =>
      series(String(one.of[0]), one.name, out, one.hue, [], one.names.join(", ")))),
  ];
}

/** A series that a click puts out, and in again: a setting, or a metric. */
function series(id, text, out, stroke, dash, title = MEANINGS[text] ?? text) {
  const shown = !out.includes(id), next = out.filter((one) => one && one !== id).concat(shown ? id : []);
  return make("button", { class: "series", id: `series-${id}`, title, "aria-pressed": String(shown),
    onclick: () => go({ out: next.join(",") }, true) }, line(stroke, dash), text);
}

function figures(view) {
  const shown = view.settings.filter((one) => !view.out.includes(String(one.of[0])));
  const marks = view.now.marks ? [] : shown.flatMap(({ of }) => of.flatMap((run) => marksOf(run, view.by)));
  const groups = new Map();
  for (const chart of chosen(view.now.panels ?? "")) {
    const element = panel(chart, { ...view, shown, marks });
    if (element) groups.set(chart.group, [...(groups.get(chart.group) ?? []), element]);
  }
  const none = answers.some((one) => one.step.length) ? "No panel name contains this text."
    : "Curves appear after the first step.";
  return groups.size ? [...groups].map(([name, elements]) =>
    fold(name, true, make("div", { class: "charts" }, ...elements))) : make("p", { class: "card" }, none);
}

function marksOf(run, by) {
  const { marks, step, [by]: x } = answers[run], name = runs.length > 1 ? `${runs[run].name}: ` : "";
  return marks.map((mark) => ({ kind: mark.kind,
    x: by === "step" ? mark.step : x[step.findIndex((one) => one >= mark.step)] ?? null,
    text: `${name}${mark.text} (step ${number(mark.step)})` })).filter((mark) => mark.x !== null);
}

// -- panels ------------------------------------------------------------------------------------------------

const columns = () => [...new Set(answers.flatMap((one) => Object.keys(one.columns)))];

/** The charts of all runs together; with words: those that have one, and other metrics that have. */
function chosen(panels) {
  const all = new Map();
  for (const chart of answers.flatMap((one) => one.charts)) {
    all.set(chart.title, { ...chart, metrics: { ...all.get(chart.title)?.metrics, ...chart.metrics } });
  }
  const words = panels.toLowerCase().split(",").map((word) => word.trim()).filter(Boolean);
  if (!words.length) return [...all.values()];
  const fits = (...texts) => words.some((word) => texts.some((text) => text.toLowerCase().includes(word)));
  const own = [...all.values()].filter(({ title, group, metrics }) =>
    fits(title, group, ...Object.keys(metrics)));
  const drawn = new Set(own.flatMap((chart) => Object.keys(chart.metrics)));
  const other = columns().filter((name) => fits(name) && !drawn.has(name) && !/\/(low|high)$/.test(name));
  return [...own, ...other.slice(0, MORE).map((name) =>
    ({ group: "other metrics", title: name, metrics: { [name]: name } }))];
}

function panel(chart, view) {
  const several = view.settings.length > 1, metrics = Object.entries(chart.metrics);
  const style = (at, own) =>
    ({ stroke: several ? own : PALETTE[at % PALETTE.length], dash: DASHES[at % DASHES.length] });
  const lines = view.shown.flatMap((setting) => metrics.map(([name, text], at) => {
    if (view.out.includes(name)) return null;
    const label = several ? `${setting.name}${metrics.length > 1 ? `: ${text}` : ""}` : text;
    const banded = (metrics.length === 1 && !several) || name.startsWith("val-");
    return curve(setting, name, { ...style(at, setting.hue), label, banded }, view);
  }).filter(Boolean));
  if (!lines.length && metrics.every(([name]) => !view.out.includes(name))) return null;
  return figure({
    ...chart, lines, log: view.now.log, by: view.by, marks: view.marks, window: view.window,
    note: [!chart.percent && !view.now.log && scales(lines), hidden(lines)].filter(Boolean).join(". "),
    legend: metrics.length < 2 ? [] : metrics.map(([name, label], at) => {
      const { stroke, dash } = style(at, "currentColor");
      return series(name, label, view.out, stroke, dash);
    }),
    onZoom: (low, high) => go({ zoom: [low, high].map((x) => Number(x.toPrecision(6))).join("~") }),
    onStep: ({ run, steps, kind }, at) => go({ tab: "episodes", run,
      where: JSON.stringify([["step", "=", steps[at]], ["kind", "=", kind]]) }),
  });
}

/** One metric of a run; of several seeds their mean, from the least to the highest as a band. */
function curve(setting, name, { banded, ...style }, view) {
  const members = setting.of.map((run) => points(answers[run], name, view)).filter(Boolean);
  if (!members.length) return null;
  const one = members.length > 1 ? averaged(members) : members[0];
  const kind = name.startsWith("val-") ? "held out" : "train";
  return { ...style, ...one, kind, bands: banded || members.length > 1 ? one.bands : [], run: setting.of[0],
    setting: setting.name };
}

function points(answer, name, { by, now }) {
  const column = answer.columns[name] ?? [], x = answer[by];
  const at = x.map((_, i) => i).filter((i) => x[i] !== null && column[i] !== undefined && column[i] !== null
    && (!now.log || column[i] > 0)).sort((a, b) => x[a] - x[b] || a - b);
  const single = at.filter((i, place) => x[at[place + 1]] !== x[i]); // uPlot joins on x
  if (!single.length) return null;
  const take = (list) => single.map((i) => list[i]), raw = take(column);
  const weight = single.length < FEW ? 0 : Number(now.smooth ?? SMOOTH);
  const smooth = (values) => (weight ? smoothing(values, weight) : values);
  const bands = (answer.bands[name] ?? []).map((ends) =>
    ends.map((end) => smooth(take(answer.columns[end]))));
  return { x: take(x), steps: take(answer.step), raw: weight ? raw : null, y: smooth(raw), bands };
}

/** An exponential moving average, which does not lean to 0 at its start. */
function smoothing(values, weight) {
  let mean = 0, left = 1;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    left *= weight;
    return mean / (1 - left);
  });
}

/** The mean of each step at which at least half of the members are under way, steps between two included. */
function averaged(members) {
  const steps = [...new Set(members.flatMap((one) => one.steps))].sort((a, b) => a - b);
  const rows = (list) => {
    const all = members.map((one) => between(one.steps, one[list], steps));
    return steps.map((_, at) => all.map((values) => values[at]).filter((v) => v !== null));
  };
  const mean = (row) => row.reduce((sum, v) => sum + v, 0) / row.length;
  const values = rows("y"), x = rows("x").map(mean);
  const many = steps.map((_, at) => at).filter((at) => values[at].length >= members.length / 2);
  const kept = many.filter((at, i) => !i || x[at] > x[many[i - 1]]); // it may not, where a slow member ends
  const of = (pick) => kept.map((at) => pick(values[at]));
  return { x: kept.map((at) => x[at]), steps: kept.map((at) => steps[at]), y: of(mean),
    bands: [[of((row) => Math.min(...row)), of((row) => Math.max(...row))]] };
}

/** Values at other steps than those where they are known; null before the first and after the last one. */
function between(known, values, steps) {
  let at = 0;
  return steps.map((step) => {
    while (at < known.length - 1 && known[at] < step) at += 1;
    if (step < known[0] || step > known[at]) return null;
    const share = known[at] === step ? 0 : (known[at] - step) / (known[at] - known[at - 1]);
    return share ? values[at] * (1 - share) + values[at - 1] * share : values[at];
  });
}

/** Says which curves are drawn over by the same ones. */
function hidden(lines) {
  const drawn = lines.map(({ x, y }) => JSON.stringify([x, y]));
  return drawn.map((one, at) => [lines[at].label, lines[drawn.indexOf(one)].label])
    .filter(([label, first]) => label !== first).map((pair) => pair.join(": same as ")).join("; ");
}

/** Put runs with much smaller values on a scale of their own, to the right; returns what the caption says. */
function scales(lines) {
  const sizes = new Map(); // by setting
  for (const { setting, y } of lines) {
    const high = y.map(Math.abs).sort((a, b) => a - b)[Math.floor(0.95 * (y.length - 1))];
    sizes.set(setting, Math.max(sizes.get(setting) ?? 0, high));
  }
  const order = [...sizes].filter(([, size]) => size > 0).sort((a, b) => a[1] - b[1]);
  if (order.length < 2 || order.at(-1)[1] < APART * order[0][1]) return "";
  const gaps = order.slice(1).map(([, size], at) => size / order[at][1]);
  const small = order.slice(0, gaps.indexOf(Math.max(...gaps)) + 1).map(([setting]) => setting);
  lines.forEach((one) => (one.right = small.includes(one.setting)));
  return `Right axis: ${small.join(", ")}`;
}
