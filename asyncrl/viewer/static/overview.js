// The tab Overview of a run: outcome, what is wrong, before and after, who waits, the flow, figures, keys.
import {
  PALETTE, badge, breakable, card, counted, explained, fold, hue, make, number, percent, redraw, seconds,
  swatch, table,
} from "view/dom.js";
import { address, link } from "view/route.js";
import { ask } from "view/source.js";

const MARKS = { good: "✓", bad: "✕", warn: "!", advice: "i" };
const LEVELS = { good: "good news", bad: "problem", warn: "warning", advice: "advice" };
const EVIDENCE = { episodes: "the episodes", charts: "the curves", time: "the timeline",
  compare: "the questions" };
const STATES = { in_flight: ["pending", "running", "landed"] }; // of which a count is; others have its name
const STRIP = ["issued", "in_flight", "ready", "taken", "trained"];
const EXITS = ["filtered", "dropped", "failed"];
const ORDER = [2, 4, 1, 3, 0, 5]; // of colours in a bar
const MOST_KEYS = 24; // that are not folded
const FEW_KEYS = 8; // up to which the configuration is a card in a column
const LONGEST = 300; // characters of a value
const [WIDE, HIGH] = [160, 36]; // of a small curve

export async function show(place, route, state, current) {
  const answer = await ask("overview", { run: route.run });
  if (!current()) return;
  const { name, path, ended, phase } = state.runs[route.run] ?? state.runs[0];
  const run = { name, path, ended, phase, number: Number(route.run) };
  const wide = answer.configuration.length > FEW_KEYS; // a long table has a row of its own, in two halves
  redraw(place, [run, answer], () => [
    headline(run, answer), ...answer.alerts.filter(wrong).map(warning),
    make("div", { class: "overview" }, heldOut(answer, run), answer.trains && training(answer),
      ...answer.alerts.filter((one) => !wrong(one)).map(warning),
      (answer.trains || answer.waits.length > 0) && waits(answer, run), answer.trains && flow(answer),
      !wide && configuration(answer)),
    wide && configuration(answer),
    ...answer.notes.map((note) => make("p", { class: "dim small" }, breakable(note))),
    ...Object.entries(answer.tables).map(([title, rows]) =>
      Object.keys(rows).length > 0 && fold(title, false, table(null, Object.entries(rows)))),
  ]);
}

function headline({ name, path, ended, phase, number: at }, { outcome }) {
  const level = /^(failed|killed)/.test(ended) ? "bad" : ended ? "good" : "";
  return make("div", { class: "outcome-line" },
    make("p", { class: "dim" },
      swatch(hue(at)), make("b", {}, name), " ", badge(ended.split(":")[0] || phase, level), " ",
      breakable(path)),
    make("h1", {}, outcome), ended.includes(":") && make("p", { class: "bad" }, ended));
}

/** Faults stand above all else, hints below the curves. */
const wrong = ({ level }) => ["bad", "warn"].includes(level);

/** What is wrong, what to change (with its present value), and a link to where it is seen. */
function warning({ name, level, what, do: advice, keys, link: seen }) {
  const setting = ([key, value]) => make("code", { class: "setting" }, breakable(`${key}, now ${value}`));
  return make("div", { class: `alert ${level}`, "data-alert": name },
    make("span", { class: `mark ${level}`, title: LEVELS[level] }, MARKS[level]),
    make("div", {}, make("b", {}, name), ": ", breakable(what), ". ",
      advice && make("span", {}, make("span", { class: "dim" }, "What to do: "), breakable(advice), ". "),
      ...Object.entries(keys).map(setting),
      EVIDENCE[seen.tab] && link(seen, `see ${EVIDENCE[seen.tab]} →`)));
}

/** A figure in its unit. */
export function figure(value, unit = "") {
  if (unit === "share") return percent(value);
  if (unit === "s") return seconds(value);
  return number(value) + (unit && !unit.startsWith("/") ? ` ${unit}` : unit);
}

const empty = (title, text) => card(title, make("p", { class: "dim" }, text));

function heldOut({ held_out: found, configuration: keys }, { ended }) {
  const asked = keys.some(([key]) => key === "data.test");
  const none = !asked ? "No held-out data: data.test is not set."
    : ended ? "No validation was run." : "No validation has finished yet.";
  if (!found.length) return empty("Held out", none);
  const rows = found.map((one) =>
    trend(one, judged(one.before, one.unit), judged(one.after, one.unit), spark(one)));
  const [first, last] = [found[0].before, found[0].after];
  const named = (one) => (one ? ` (step ${one.step})` : "");
  const of = `of ${number((last ?? first).questions)} questions`;
  return card("Held out",
    table(["", `before${named(first)}`, `last${named(last)}`, "by step"], rows, { class: "trends" }),
    (last ?? first).interval && make("p", { class: "dim small" }, `${of}, with 95% intervals`),
    found.some((one) => Object.keys(one.tasks ?? {}).length) && link({ tab: "compare" }, "by task →"));
}

const trend = (one, ...cells) => make("tr", { class: one.part ? "part" : "" },
  make("th", { scope: "row" }, explained(one.label)), ...cells.map((cell) => make("td", {}, cell)));

export function judged(one, unit) {
  const text = (value) => figure(value, unit);
  return make("div", {}, make("b", {}, text(one?.value)),
    one?.interval && make("div", { class: "dim small" }, one.interval.map(text).join(" to ")));
}

/** A curve without axes; one value is a point. */
function spark({ curve, label }) {
  if (!curve.length) return null;
  const [xs, ys] = [0, 1].map((at) => curve.map((point) => point[at]));
  const scale = (values, from, to) => {
    const low = Math.min(...values), size = Math.max(...values) - low;
    return values.map((value) => (from + (size ? (value - low) / size : 0.5) * (to - from)).toFixed(1));
  };
  const [x, y] = [scale(xs, 3, WIDE - 3), scale(ys, HIGH - 4, 4)];
  const text = `${label}: ${number(Math.min(...ys))} to ${number(Math.max(...ys))}, `
    + `steps ${xs[0]} to ${xs.at(-1)}`;
  const points = x.map((at, i) => `${at},${y[i]}`).join(" ");
  const seen = { viewBox: `0 0 ${WIDE} ${HIGH}`, class: "spark", role: "img", "aria-label": text };
  return make("svg:svg", seen, make("svg:title", {}, text), make("svg:polyline", { points }),
    make("svg:circle", { cx: x.at(-1), cy: y.at(-1), r: 2.5 }));
}

/** The first and the last tenth of the steps, with a curve. */
function training({ figures: found }) {
  if (!found.length) return empty("Training", "No step has finished yet.");
  const rows = found.map((one) => trend(one, figure(one.first, one.unit),
    make("b", {}, figure(one.last, one.unit)), spark(one)));
  return card("Training", table(["", "first tenth", "last tenth", "by step"], rows, { class: "trends" }));
}

/** One bar a role: where its time went, and what it waits for now. */
function waits({ waits: roles }, { ended, phase }) {
  const none = ended ? "No step times were recorded."
    : `${phase}: no waits; time shares appear after the first step.`;
  if (!roles.length) return empty("Who waits for whom", none);
  return card("Who waits for whom", ...roles.map(({ role, note, parts, now }) =>
    make("div", { class: "who-waits", "data-role": role },
      make("div", {}, make("b", {}, explained(role)), make("span", { class: "dim" }, ` ${note}`)),
      Object.keys(parts).length > 0 && bar(Object.entries(parts)),
      ...now.map((wait) => make("div", { class: "small" }, make("span", { class: "warn" }, "now: "), wait)))),
  make("p", { class: "small" }, link({ tab: "time" }, "timeline of all processes →")));
}

function bar(parts) {
  const shown = parts.filter(([, share]) => share >= 0.005);
  const rest = 1 - shown.reduce((sum, [, share]) => sum + share, 0);
  const hues = shown.map(([what], at) =>
    (what.startsWith("wait") ? "var(--line)" : PALETTE[ORDER[at % ORDER.length]]));
  const texts = shown.map(([what, share]) => `${what} ${percent(share)}`);
  const fill = shown.map(([, share], at) =>
    make("span", { style: { width: percent(share), background: hues[at] } }));
  return make("div", {},
    make("div", { class: "shares", role: "img", "aria-label": texts.join(", ") }, ...fill),
    make("div", { class: "legend small" },
      ...texts.map((text, at) => make("span", {}, swatch(hues[at]), text)),
      rest > 0.005 && make("span", {}, swatch("var(--raised)"), `other ${percent(rest)}`)));
}

/** From issued to trained, and those that are not trained; each count leads to its episodes. */
function flow({ flow: counts, running, reasons, conserved }) {
  if (!counts.issued) return empty("Episode flow", "No episodes issued yet.");
  const box = (name) => {
    const count = counts[name] ?? 0, where = (STATES[name] ?? [name]).map((state) => ["state", "=", state]);
    const now = name === "in_flight" && running ? `, ${number(running)} running` : "";
    const found = name !== "issued" && count && address({ tab: "episodes", where: JSON.stringify(where) });
    return make(found ? "a" : "span", { class: "box", href: found || null },
      make("b", {}, count.toLocaleString("en")),
      make("span", { class: "dim" }, explained(name.replace("_", " ")), now));
  };
  const arrow = () => make("span", { class: "dim", "aria-hidden": "true" }, "→");
  const why = Object.entries(reasons).map(([reason, count]) => `${number(count)} ${reason}`).join(", ");
  return card("Episode flow",
    make("div", { class: "strip" }, ...STRIP.flatMap((name, at) => [at > 0 && arrow(), box(name)])),
    make("div", { class: "strip exits" }, make("span", { class: "dim" }, "not trained:"),
      ...EXITS.map(box), make("span", { class: "dim small" }, why)),
    make("p", { class: `small ${conserved ? "good" : "bad"}` }, conserved
      ? "✓ every episode is accounted for" : "✕ the episode counts do not add up"));
}

/** The value of a key; nothing is a dash. */
export function setting(value) {
  const small = typeof value === "number" && value && Math.abs(value) < 1e-3;
  const text = small ? value.toExponential() : typeof value === "string" ? value : JSON.stringify(value);
  const shown = [null, "", "-"].includes(value) ? "–" : text.slice(0, LONGEST);
  const more = text.length > LONGEST && `… (${number(text.length)} characters)`;
  return make("code", {}, breakable(shown), more);
}

/** A key, which may go on in the next line after a dot or an underscore. */
export const keyed = (key) =>
  make("span", {}, ...key.split(/(?<=[._])/).flatMap((part) => [part, make("wbr")]));

function configuration({ configuration: keys }) {
  const rows = keys.map(([key, value, usual]) =>
    [make("code", {}, keyed(key)), setting(value), make("span", { class: "dim" }, setting(usual))]);
  const title = `${counted(rows.length, "key")} with non-default values`, half = Math.ceil(rows.length / 2);
  const halves = rows.length > FEW_KEYS ? [rows.slice(0, half), rows.slice(half)] : [rows];
  return card("Configuration", fold(title, rows.length <= MOST_KEYS, make("div", { class: "halves" },
    ...halves.map((some) => table(["key", "value", "default"], some, { class: "keys" })))));
}
