// The tab of curves: what a run earns, how old its tokens are, how fast it is; with what happened when.
import { DASHES, figure, line } from "view/charts.js";
import { PALETTE, fold, hue, make, number, percent, redraw } from "view/dom.js";
import { go, route } from "view/route.js";
import { ask, isFile } from "view/source.js";

const X = { step: "step", tokens: "tokens trained", seconds: "time" };
const MARKS = { restart: "restarts", resume: "other keys", lost: "lost workers", alert: "alerts",
  validation: "validations" };
const SMOOTH = 0.6; // share that the past has
const FEW = 20; // points from which on a curve is smoothed
const APART = 20; // times: runs whose scales differ so have scales of their own
const MORE = 12; // metrics that are in no chart and whose names fit
const SHORT = 34; // characters of a legend's entry

const known = new Map(); // of each run and stretch: {rows, answer}
const off = new Set(); // series that a click has put out: "title/label"
let answers = [], runs = [], again = () => {};

export async function show(place, now, state, current) {
  runs = state.runs;
  const whole = await Promise.all(runs.map((run, at) => answer(run, at, {})));
  const zoom = now.zoom ? now.zoom.split("~").map(Number) : null;
  answers = await Promise.all(whole.map((one, at) => closer(one, at, zoom, now.by ?? "step")));
  if (!current()) return;
  const settings = settingsOf(state, now.seeds !== "apart");
  again = () => draw(place, route(), settings, state);
  again();
}

/** Asked again once there is a thousandth more: a long run is not drawn anew at each step. */
async function answer(run, at, stretch) {
  const name = JSON.stringify([at, stretch]), old = known.get(name);
  if (old && (isFile || (run.rows < old.rows * 1.001 && run.ended === old.ended))) return old.answer;
  const found = await ask("rows", { run: at, ...stretch });
  for (const key of known.keys()) if (JSON.stringify(stretch) !== "{}"
    && key.startsWith(`[${at},{"from`)) known.delete(key);
  known.set(name, { rows: run.rows, ended: run.ended, answer: found });
  return found;
}

/** Of a long run that was thinned: the stretch that is looked at, with more of its steps. */
async function closer(whole, at, zoom, by) {
  if (!zoom || isFile || whole.steps <= whole.step.length) return whole;
  const x = whole[by];
  const inside = whole.step.filter((_, i) => x[i] >= zoom[0] && x[i] <= zoom[1]);
  const before = whole.step.filter((_, i) => x[i] < zoom[0]).at(-1),
    after = whole.step.find((_, i) => x[i] > zoom[1]);
  const [from, to] = [before ?? inside[0], after ?? inside.at(-1)];
  if (from === undefined || to === undefined) return whole;
  return { ...(await answer(runs[at], at, { from, to })), marks: whole.marks };
}

/** Runs whose configurations differ by their seeds alone are one setting. */
export function settingsOf(state, together = true) {
  const keys = Object.entries(state.differences).filter(([key]) => !/(^|\.)seed$/.test(key));
  const found = new Map();
  state.runs.forEach((run, at) => {
    const setting = together ? JSON.stringify(keys.map(([, values]) => values[at])) : String(at);
    found.set(setting, [...(found.get(setting) ?? []), at]);
  });
  return [...found.values()].map((of) => ({ of, hue: hue(of[0]),
    name: of.length > 1 ? `${of.length} seeds of ${common(state.runs, of)}` : state.runs[of[0]].name }));
}

function common(runs, of) {
  const names = of.map((at) => runs[at].name);
  let length = 0;
  while (length < names[0].length && names.every((name) => name[length] === names[0][length])) length += 1;
  const shared = names[0].slice(0, length).replace(/[-_./]?(s|seed)?[-_./]?$/, "");
  return shared || runs[of[0]].path.split("/").at(-2) || names[0];
}

// -- the page ----------------------------------------------------------------------------------------------

function draw(place, now, settings, state) {
  const by = X[now.by] ? now.by : "step";
  if (!document.getElementById("figures")) {
    place.replaceChildren(make("div", { class: "bar", id: "chart-bar" }), make("div", { id: "figures" }));
  }
  bar(now, by, settings, state);
  const ends = answers.flatMap((one) => one[by]).filter((x) => x !== null).reduce(
    ([a, b], x) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]);
  const view = { ...now, by, window: now.zoom ? now.zoom.split("~").map(Number) : ends,
    smooth: Number(now.smooth ?? SMOOTH), hidden: (now.hide ?? "").split(","), settings };
  const groups = new Map();
  for (const chart of chosen(now.panels ?? "")) {
    const element = panel(chart, view);
    if (element) groups.set(chart.group, [...(groups.get(chart.group) ?? []), element]);
  }
  const lags = now.panels ? null : lagTable(settings);
  if (lags) groups.set("staleness", [...(groups.get("staleness") ?? []), lags]);
  const parts = [...groups].map(([name, elements]) => group(name, elements));
  const none = answers.some((one) => one.step.length) ? "No panel has this in its name."
    : "No step is over yet: curves begin with the first one.";
  const figures = document.getElementById("figures");
  const kept = [...figures.children];
  if (kept.length !== parts.length || kept.some((one,
    at) => one !== parts[at])) figures.replaceChildren(...parts);
  if (!parts.length) figures.replaceChildren(make("p", { class: "card" }, none));
}

const made = new Map(); // groups stay, and with them what was folded
function group(name, elements) {
  if (!made.has(name)) made.set(name, fold(name, true, make("div", { class: "charts" })));
  const inside = made.get(name).lastElementChild, kept = [...inside.children];
  if (kept.length !== elements.length || kept.some((one,
    at) => one !== elements[at])) inside.replaceChildren(...elements);
  return made.get(name);
}

function bar(now, by, settings, state) {
  const place = document.getElementById("chart-bar");
  const seeds = settingsOf(state, true).length < runs.length;
  const kinds = Object.keys(MARKS).filter((kind) =>
    answers.some((one) => one.marks.some((mark) => mark.kind === kind)));
  const put = (now.out ?? "").split(",");
  redraw(place, [by, now.log, now.hide, now.zoom, now.seeds, now.out, kinds, settings, seeds], () => [
    make("span", { class: "choice", role: "group", "aria-label": "x axis" },
      ...Object.entries(X).map(([key, label]) =>
      button(`by-${key}`, label, by === key,
        () => go({ by: key === "step" ? null : key, zoom: null }, true)))),
    make("label", { class: "dim", title: "what the past weighs; raw values stay faint behind" }, "smoothing ",
      make("input", { id: "smooth", type: "range", min: 0, max: 0.98, step: 0.02,
        value: now.smooth ?? SMOOTH, oninput: smoothed })),
    button("log", "log", now.log === "1", () => go({ log: now.log === "1" ? null : 1 }, true)),
    seeds && button("seeds", "seeds together", now.seeds !== "apart",
      () => go({ seeds: now.seeds === "apart" ? null : "apart" }, true)),
    make("input", { id: "panels", list: "panel-names", placeholder: "panels by name: entropy, lag",
      value: now.panels ?? "",
      "aria-label": "panels by name", onchange: (event) => go({ panels: event.target.value.trim() }) }),
    make("datalist", { id: "panel-names" }, ...names().map((value) => make("option", { value }))),
    kinds.length > 0 && make("span", { class: "dim" }, "marks:"),
    ...kinds.map((kind) => toggle(`mark-${kind}`, MARKS[kind], "hide", now.hide, kind)),
    now.zoom && button("whole", "all steps", false, () => go({ zoom: null })),
    runs.length > 1 && make("span", { class: "legend" }, ...settings.map((one) => make("button", {
      class: "series", id: `setting-${one.of[0]}`, title: one.of.map((at) => runs[at].name).join(", "),
      "aria-pressed": String(!put.includes(String(one.of[0]))),
        onclick: () => go({ out: flipped(now.out, String(one.of[0])) }, true),
    }, line(one.hue), one.name))),
  ]);
  const field = document.getElementById("panels");
  if (field !== document.activeElement) field.value = now.panels ?? "";
}

const button = (id, text, on, onclick) => make("button", { id, "aria-pressed": String(on), onclick }, text);
const toggle = (id, text, key, now, value) =>
  button(id, text, !(now ?? "").split(",").includes(value), () => go({ [key]: flipped(now, value) }, true));

function flipped(list, value) {
  const now = (list ?? "").split(",").filter(Boolean);
  return (now.includes(value) ? now.filter((one) => one !== value) : [...now, value]).join(",");
}

let later = 0;
function smoothed(event) {
  clearTimeout(later); // the address of each position that is dragged over is not kept
  later = setTimeout(() => go({ smooth: Number(event.target.value) === SMOOTH ? null : event.target.value },
    true), 60);
}

// -- panels ------------------------------------------------------------------------------------------------

/** The charts of all runs together. */
function all() {
  const found = new Map();
  for (const chart of answers.flatMap((one) => one.charts)) {
    const old = found.get(chart.title);
    found.set(chart.title, old ? { ...old, metrics: { ...old.metrics, ...chart.metrics } } : chart);
  }
  return [...found.values()];
}

const names = () => [...all().map((chart) => chart.title),
  ...new Set(answers.flatMap((one) => Object.keys(one.columns)))];

/** Those with one of the words, and other metrics that have one. */
function chosen(panels) {
  const words = panels.toLowerCase().split(",").map((word) => word.trim()).filter(Boolean);
  if (!words.length) return all();
  const fits = (text) => words.some((word) => text.toLowerCase().includes(word));
  const exact = all().filter((chart) => words.includes(chart.title.toLowerCase().split(",")[0])
    || fits(`${chart.title} ${chart.group}`));
  const drawn = new Set(exact.flatMap((chart) => Object.keys(chart.metrics)));
  const other = [...new Set(answers.flatMap((one) => Object.keys(one.columns)))].filter((name) =>
    fits(name) && !drawn.has(name)
    && !/\/(low|high)$/.test(name)).slice(0, MORE);
  return [...exact, ...other.map((name) => ({ group: "other metrics", title: name,
    metrics: { [name]: name }, large: false, percent: false }))];
}

function panel(chart, view) {
  const several = view.settings.length > 1, out = (view.out ?? "").split(",");
  const shownSettings = view.settings.filter((one) => !out.includes(String(one.of[0])));
  const metrics = Object.entries(chart.metrics);
  const some = metrics.filter(([name]) => answers.some((one) => one.columns[name]?.some((v) => v !== null)));
  if (!some.length || !shownSettings.length) return null;
  const style = (setting, at) => ({ stroke: several ? setting.hue
    : PALETTE[(view.settings[0].of[0] + at) % PALETTE.length], dash: DASHES[at % DASHES.length] });
  const lines = shownSettings.flatMap((setting) => some.map(([name, label], at) => {
    if (off.has(`${chart.title}/${label}`)) return null;
    const bands = (some.length === 1 && !several) || name.startsWith("val-");
    return curve(setting, name, several ? `${setting.name}${some.length > 1 ? `: ${label}` : ""}` : label,
      { ...style(setting, at), bands }, view);
  }).filter(Boolean));
  const note = chart.percent ? "" : scales(lines, view);
  const keys = some.length < 2 ? [] : some.map(([, label], at) => ({
    ...style({ hue: "currentColor" }, at),
      label: label.length > SHORT ? `${label.slice(0, SHORT)}…` : label,
        shown: !off.has(`${chart.title}/${label}`),
  }));
  const full = (label) => some.find(([, one]) => one === label || one.startsWith(label.slice(0, SHORT)))[1];
  return figure({
    ...chart, note, lines, keys, log: view.log === "1", by: view.by, marks: marksOf(shownSettings, view),
    window: view.window,
    onZoom: (low, high) => go({ zoom: low === null ? null
      : `${Number(low.toPrecision(6))}~${Number(high.toPrecision(6))}` }),
    onStep: (one, at) => go({ tab: "episodes", run: one.run,
      where: JSON.stringify([["step", "=", one.steps[at]]]) }),
    onKey: (label) => {
      const id = `${chart.title}/${full(label)}`;
      off.has(id) ? off.delete(id) : off.add(id);
      again();
    },
  });
}

/** One metric of a run; of several seeds their mean, from the least to the highest as a band. */
function curve(setting, name, label, { stroke, dash, bands }, view) {
  const members = setting.of.map((run) => points(answers[run], name, view)).filter(Boolean);
  if (!members.length) return null;
  const shared = { label, stroke, dash, run: setting.of[0], metric: name };
  if (members.length > 1) return { ...shared, ...averaged(members), raw: null };
  const [one] = members;
  const pairs = bands ? one.pairs : [];
  return { ...shared, x: one.x, steps: one.steps, y: one.y, raw: one.y === one.raw ? null : one.raw,
    bands: pairs };
}

function points(answer, name, view) {
  const column = answer.columns[name];
  if (!column) return null;
  const x = answer[view.by], positive = (v) => v !== null && (view.log !== "1" || v > 0);
  const at = x.map((_, i) => i).filter((i) => positive(column[i]) && x[i] !== null).sort((a,
    b) => x[a] - x[b] || a - b);
  const single = at.filter((i, place) => x[at[place + 1]] !== x[i]); // uPlot joins on x
  if (!single.length) return null;
  const take = (list) => single.map((i) => list[i]);
  const weight = single.length < FEW ? 0 : view.smooth, raw = take(column);
  const smooth = (values) => (weight ? smoothing(values, weight) : values);
  const pairs = (answer.bands[name] ?? []).map((pair) =>
    pair.map((end) => smooth(take(answer.columns[end]))));
  return { x: take(x), steps: take(answer.step), raw, y: smooth(raw), pairs };
}

/** An exponential moving average, which does not lean to 0 at its start. */
export function smoothing(values, weight) {
  let mean = 0, left = 1;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    left *= weight;
    return mean / (1 - left);
  });
}

/** Where at least half of the seeds are under way, steps between two known ones included. */
export function averaged(members) {
  const steps = [...new Set(members.flatMap((one) => one.steps))].sort((a, b) => a - b);
  const places = members.map(() => 0);
  const rows = steps.map((step) => members.map((one, at) => {
    while (places[at] < one.steps.length - 1 && one.steps[places[at]] < step) places[at] += 1;
    const here = places[at], before = Math.max(0, here - 1);
    if (one.steps[here] < step || one.steps[0] > step) return null;
    const share = here === before ? 0 : (one.steps[here] - step) / (one.steps[here] - one.steps[before]);
    return ["x", "y"].map((list) => one[list][here] * (1 - share) + one[list][before] * share);
  }).filter(Boolean));
  const kept = steps.map((_, at) => at).filter((at) => rows[at].length >= members.length / 2);
  const of = (pick, at) => kept.map((row) => pick(rows[row].map((pair) => pair[at])));
  const mean = (values) => values.reduce((sum, v) => sum + v, 0) / values.length;
  const order = (list) => list.map((v, i) =>
    (i && v <= list[i - 1] ? list[i - 1] + 1e-9 * Math.abs(v || 1) : v)); // x goes on
  return { x: order(of(mean, 0)), steps: kept.map((at) => steps[at]), y: of(mean, 1),
    bands: [[of((v) => Math.min(...v), 1), of((v) => Math.max(...v), 1)]] };
}

/** Put runs with much smaller values on a scale of their own, to the right; returns what the caption says. */
function scales(lines, view) {
  const sizes = new Map();
  for (const one of lines) {
    const high = one.y.map(Math.abs).sort((a, b) => a - b)[Math.floor(0.95 * (one.y.length - 1))];
    sizes.set(one.run, Math.max(sizes.get(one.run) ?? 0, high));
  }
  const order = [...sizes].filter(([, size]) => size > 0).sort((a, b) => a[1] - b[1]);
  if (view.log === "1" || order.length < 2 || order.at(-1)[1] < APART * order[0][1]) return "";
  const gaps = order.slice(1).map(([, size], at) => size / order[at][1]);
  const cut = gaps.indexOf(Math.max(...gaps)) + 1, small = new Set(order.slice(0, cut).map(([run]) => run));
  lines.forEach((one) => (one.right = small.has(one.run)));
  const named = view.settings.filter((one) => small.has(one.of[0])).map((one) => one.name);
  return `Right axis: ${named.join(", ")}`;
}

function marksOf(settings, view) {
  const style = getComputedStyle(document.documentElement);
  const hues = { alert: "--warn", lost: "--bad", resume: "--accent", restart: "--dim", validation: "--dim" };
  return settings.flatMap(({ of }) => of.flatMap((run) =>
    answers[run].marks.filter((mark) => !view.hidden.includes(mark.kind)).map((mark) => {
    const at = answers[run].step.findIndex((step) => step >= mark.step);
    const x = view.by === "step" ? mark.step : answers[run][view.by][at];
    const name = runs.length > 1 ? `${runs[run].name}: ` : "";
    return { ...mark, x, stroke: style.getPropertyValue(hues[mark.kind]).trim(),
      text: `${name}${mark.text} (step ${number(mark.step)})` };
  }))).filter((mark) => mark.x !== undefined && mark.x !== null);
}

let lagsDrawn = null;
function lagTable(settings) {
  const counts = settings.map(({ of }) => of.reduce((sum, run) => {
    Object.entries(answers[run].lags).forEach(([lag, count]) => (sum[lag] = (sum[lag] ?? 0) + count));
    return sum;
  }, {}));
  const lags = [...new Set(counts.flatMap(Object.keys).map(Number))].sort((a, b) => a - b);
  if (!lags.length) return null;
  lagsDrawn ??= make("figure", { "data-title": "Tokens by lag" });
  redraw(lagsDrawn, [counts, settings], () => [
    make("figcaption", {}, make("b", {}, "Tokens by lag, all steps")),
    make("div", { class: "lags" }, ...lags.flatMap((lag) => [make("span", { class: "dim" }, String(lag)),
      make("span", {}, ...counts.map((one, at) => {
        const share = (one[lag] ?? 0) / (Object.values(one).reduce((sum, count) => sum + count, 0) || 1);
        return make("span", { class: "lag", title: settings[at].name },
          make("span", { style: { width: `${80 * share}%`, background: settings[at].hue } }), percent(share));
      }))])),
  ]);
  return lagsDrawn;
}
