// The tab Overview of a run: outcome, what is wrong, before and after, who waits, the flow, figures, keys.
import {
  PALETTE, badge, card, fold, hue, make, number, percent, redraw, seconds, swatch, table,
} from "view/dom.js";
import { address, link } from "view/route.js";
import { ask } from "view/source.js";

const MARKS = { good: "✓", bad: "✕", warn: "!", advice: "i" };
const LEVELS = { good: "good news", bad: "wrong", warn: "look at this", advice: "advice" };
const EVIDENCE = { episodes: "the episodes", charts: "the curves", time: "what each process did" };
const STATES = ["ready", "taken", "trained"];
const EXITS = ["filtered", "dropped", "failed"];
const IN_FLIGHT = ["pending", "running", "landed"];
const WAIT = "wait for data"; // of the trainer: it has no colour
const ORDER = [2, 4, 1, 3, 0, 5]; // of colours in a bar
const MOST_KEYS = 24; // that are not folded
const MOST_LAUNCHES = 3; // that changed keys
const [WIDE, HIGH] = [160, 36]; // of a small curve

export async function show(place, route, state, current) {
  const answer = await ask("overview", { run: route.run });
  if (!current()) return;
  const run = state.runs[route.run] ?? state.runs[0];
  const known = (({ name, path, ended, phase, step, total_steps: total, waits }) =>
    ({ name, path, ended, phase, step, total, waits }))(run);
  redraw(place, [route.run, known, answer], () => draw(known, Number(route.run), answer));
}

function draw(run, number, answer) {
  return [
    headline(run, number, answer),
    ...answer.alerts.map(warning), ...answer.launches.slice(-MOST_LAUNCHES).map(resumed),
    make("div", { class: "overview" },
      beforeAndAfter(answer), figures(answer), waits(answer), flow(answer), configuration(answer)),
    ...more(answer),
  ];
}

function headline(run, number, answer) {
  const level = /^(failed|killed)/.test(run.ended) ? "bad" : run.ended ? "good" : "";
  const doing = run.ended ? run.ended.split(":")[0] : run.phase;
  const why = run.ended.includes(":") ? make("p", { class: "bad" }, run.ended) : null;
  return make("div", { class: "headline" },
    make("p", { class: "dim" },
      swatch(hue(number)), make("b", {}, run.name), " ", badge(doing, level), " ", run.path),
    make("h1", {}, answer.outcome), why);
}

/** What is wrong, what to change (with its present value), and a link to where it is seen. */
function warning(alert) {
  const setting = ([key, value]) => make("code", { class: "setting" }, `${key} = ${value}`);
  const see = EVIDENCE[alert.link.tab];
  return make("div", { class: `alert ${alert.level}`, "data-alert": alert.name },
    make("span", { class: `mark ${alert.level}`, title: LEVELS[alert.level] }, MARKS[alert.level]),
    make("div", {},
      make("b", {}, alert.name), ": ", alert.what, ". ",
      make("span", { class: "dim" }, "What to do: "), alert.do, ". ",
      ...Object.entries(alert.keys).map(setting),
      see ? link(alert.link, `see ${see} →`) : null));
}

/** A figure in its unit. */
function figure(value, unit) {
  if (unit === "share") return percent(value);
  if (unit === "s") return seconds(value);
  return number(value) + (unit.startsWith("/") ? unit : unit ? ` ${unit}` : "");
}

const empty = (title, text) => card(title, make("p", { class: "dim" }, text));

function beforeAndAfter({ before_after: found, components }) {
  if (!found.length) return empty("Held out", "No validation is over; data.test asks for some.");
  const rows = found.map((one) => make("tr", {},
    make("th", { scope: "row" }, one.label), ...["before", "after"].map((when) => judged(one, when)),
    make("td", {}, one.unit ? intervals(one) : spark(one.curve, one.label))));
  const judgedParts = components.filter((one) => one.before !== null || one.after !== null);
  const parts = judgedParts.map((one) => make("tr", { class: "part" },
    make("th", { scope: "row" }, one.label), make("td", {}, number(one.before)),
    make("td", {}, number(one.after)), make("td")));
  const [first, last] = ["before_step", "after_step"].map((key) => found[0][key]);
  const named = (step) => (step === null ? "" : ` (step ${step})`);
  const count = found[0].after_episodes ?? found[0].before_episodes;
  return card("Held out",
    table(["", `before${named(first)}`, `last${named(last)}`, ""], [...rows, ...parts], { class: "trends" }),
    count ? make("p", { class: "dim small" }, `${number(count)} episodes each, with 95% intervals`) : null);
}

function judged(one, when) {
  const interval = one[`${when}_ci`];
  return make("td", {}, make("b", {}, figure(one[when], one.unit)),
    interval ? make("div", { class: "dim small" }, interval.map(percent).join(" to ")) : null);
}

/** Both intervals on an axis from 0 to 1: grey before, coloured after. */
function intervals(one) {
  const at = (share) => 4 + share * (WIDE - 8);
  const parts = [svg("line", { x1: 4, x2: WIDE - 4, y1: HIGH / 2, y2: HIGH / 2, class: "axis" })];
  ["before", "after"].forEach((when, row) => {
    const ci = one[`${when}_ci`];
    if (one[when] === null || !ci) return;
    const y = 11 + row * 14;
    parts.push(svg("line", { x1: at(ci[0]), x2: at(ci[1]), y1: y, y2: y, class: `interval ${when}` }),
      svg("circle", { cx: at(one[when]), cy: y, r: 4, class: `point ${when}` }));
  });
  return drawing(`${one.label}: before and last, from 0% to 100%`, parts);
}

function svg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  Object.entries(attributes).forEach(([name, value]) => element.setAttribute(name, value));
  return element;
}

function drawing(label, parts) {
  const box = `0 0 ${WIDE} ${HIGH}`;
  const element = svg("svg", { viewBox: box, class: "spark", role: "img", "aria-label": label });
  element.append(...parts);
  return element;
}

/** A curve without axes; one value is a point. */
function spark(points, label) {
  const known = points.filter(([, value]) => Number.isFinite(value));
  if (!known.length) return null;
  const [xs, ys] = [known.map(([x]) => x), known.map(([, y]) => y)];
  const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const x = (value) => (right > left ? 3 + ((value - left) / (right - left)) * (WIDE - 6) : WIDE / 2);
  const y = (value) => (high > low ? HIGH - 4 - ((value - low) / (high - low)) * (HIGH - 8) : HIGH / 2);
  const line = known.map((point) => `${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`).join(" ");
  const last = known.at(-1);
  const text = `${label}: ${number(low)} to ${number(high)}, steps ${left} to ${right}`;
  const element = drawing(text, [
    svg("polyline", { points: line, class: "curve" }),
    svg("circle", { cx: x(last[0]), cy: y(last[1]), r: 2.5, class: "point after" })]);
  element.append(svg("title", {}));
  element.lastChild.textContent = text;
  return element;
}

/** Training: the first and the last tenth of the steps, with a curve. */
function figures({ figures: found, components }) {
  if (!found.length) return empty("Training", "No step is over yet.");
  const scored = (one) => one.metric === "rollout/score/mean";
  const parts = components.map((one) => row(one, "part"));
  const rows = found.flatMap((one) => [row(one), ...(scored(one) ? parts : [])]);
  return card("Training", table(["", "first tenth", "last tenth", "by step"], rows, { class: "trends" }));
}

function row(one, kind = "") {
  return make("tr", { class: kind }, make("th", { scope: "row" }, one.label),
    make("td", {}, figure(one.first, one.unit)), make("td", {}, make("b", {}, figure(one.last, one.unit))),
    make("td", {}, spark(one.curve, one.label)));
}

/** One bar a role: where its time went, and what it waits for now. */
function waits({ waits: roles }) {
  const title = "Who waits for whom";
  if (!roles.length) return empty(title, "It is known after the first step.");
  return card(title, ...roles.map((role) => make("div", { class: "role", "data-role": role.role },
    make("div", {}, make("b", {}, role.role), make("span", { class: "dim" }, ` ${role.note}`)),
    role.parts.length ? bar(role.parts) : null,
    ...role.now.map((wait) =>
      make("div", { class: "small" }, make("span", { class: "warn" }, "now: "), wait)))),
  make("p", { class: "small" }, link({ tab: "time" }, "what each process did when →")));
}

function bar(parts) {
  const shown = parts.filter((part) => part.share >= 0.005);
  const used = shown.reduce((sum, part) => sum + part.share, 0);
  const own = (at) => PALETTE[ORDER[at % ORDER.length]];
  const hues = shown.map((part, at) => (part.what === WAIT ? "var(--line)" : own(at)));
  const fill = shown.map((part, at) => {
    const width = percent(part.share);
    return make("span", { style: { width, background: hues[at] } });
  });
  const texts = shown.map((part) => `${part.what} ${percent(part.share)}`);
  const names = texts.map((text, at) => make("span", {}, swatch(hues[at]), text));
  const idle = used < 0.995 ? [make("span", {}, swatch("var(--raised)"), `idle ${percent(1 - used)}`)] : [];
  const shares = make("div", { class: "shares", role: "img", "aria-label": texts.join(", ") }, ...fill);
  return make("div", {}, shares,
    make("div", { class: "legend small" }, ...names, ...idle));
}

/** From issued to trained, and the three ways out on the way there; each count leads to its episodes. */
function flow({ flow: counts, running, reasons, identity, conserved }) {
  const title = "Flow of episodes";
  if (!counts.issued) return empty(title, "No episode was issued yet.");
  const box = (name, states, more = "") => {
    const count = make("b", {}, counts[name].toLocaleString("en"));
    const inside = [count, make("span", { class: "dim" }, name.replace("_", " ") + more)];
    const where = JSON.stringify(states.map((state) => ["state", "=", state]));
    const known = states.length && counts[name];
    return known ? make("a", { class: "box", href: address({ tab: "episodes", where }) }, ...inside)
      : make("span", { class: "box" }, ...inside);
  };
  const now = running ? `, ${number(running)} running` : "";
  const states = STATES.map((name) => box(name, [name]));
  const boxes = [box("issued", []), box("in_flight", IN_FLIGHT, now), ...states];
  const arrow = () => make("span", { class: "dim", "aria-hidden": "true" }, "→");
  const why = Object.entries(reasons).map(([reason, count]) => `${number(count)} ${reason}`).join(", ");
  const exact = conserved ? "✓ every episode is in one state: " : "✕ the account is not exact: ";
  return card(title,
    make("div", { class: "strip" }, ...boxes.flatMap((one, at) => (at ? [arrow(), one] : [one]))),
    make("div", { class: "strip exits" }, make("span", { class: "dim" }, "left on the way:"),
      ...EXITS.map((name) => box(name, [name])), make("span", { class: "dim small" }, why)),
    make("p", { class: `small ${conserved ? "good" : "bad"}` }, exact,
      make("span", { class: "dim" }, identity)));
}

const code = (text) => make("code", {}, text);

/** A launch that went on with other keys. */
function resumed({ step, changes }) {
  const change = (one) => make("span", { class: "setting" }, `${one.key} ${one.before} → ${one.after}`);
  return make("div", { class: "alert advice", "data-launch": step },
    make("span", { class: "mark advice", "aria-hidden": "true" }, "↻"),
    make("div", {}, make("b", {}, "resumed with other keys"), `, from step ${step}: `, ...changes.map(change),
      link({ tab: "charts" }, "see the curves →")));
}

function configuration({ configuration: keys }) {
  const faint = (text) => make("span", { class: "dim" }, code(text));
  const rows = keys.map((one) => [code(one.key), code(one.value), faint(one.default)]);
  const title = `${rows.length} keys differ from their defaults`;
  const found = table(["key", "value", "default"], rows, { class: "keys" });
  return card("Configuration", fold(title, rows.length <= MOST_KEYS, found));
}

function more({ notes, tables }) {
  const found = Object.entries(tables).filter(([, rows]) => Object.keys(rows).length);
  return [...notes.map((note) => make("p", { class: "dim small" }, note)),
    ...found.map(([title, rows]) => fold(title, false, table(null, Object.entries(rows))))];
}
