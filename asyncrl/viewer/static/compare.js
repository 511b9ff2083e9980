// The tab of a comparison: two validations question by question, what flipped, and what configurations have.
import { fold, hue, make, number, percent, redraw, swatch, table } from "view/dom.js";
import { go, link } from "view/route.js";
import { setting } from "view/overview.js";
import { ask } from "view/source.js";

export async function show(place, now, state, current) {
  const runs = state.runs;
  const [a, b] = [Number(now.a ?? 0), Number(now.b ?? Math.min(1, runs.length - 1))];
  const found = await ask("compare", { a, b, from: now.from,
    to: now.to }).catch((error) => ({ error: error.message }));
  if (!current()) return;
  redraw(place, [found, a, b, runs.map((run) => run.name), state.differences], () => [
    make("section", { class: "card" }, chooser(runs, [a, b], found),
      ...(found.error ? [make("p", {}, found.error)] : outcome(found, runs, [a, b]))),
    differing(state), // before what may be long
    found.error ? null : flips(found, runs, [a, b]),
  ]);
}

function chooser(runs, sides, found) {
  const one = (at, key, step) => make("span", {}, swatch(hue(sides[at])),
    choice(key, runs.map((run, value) => [value, run.name]), sides[at], { [step]: null }), " step ",
    choice(step, (found.validations?.[at] ?? []).map((value) => [value, number(value)]), found.steps?.[at],
      {}));
  return make("div", { class: "bar" }, one(0, "a", "from"), make("b", {}, "→"), one(1, "b", "to"));
}

function choice(key, options, value, more) {
  return make("select", { id: `compare-${key}`, "aria-label": key,
    onchange: (event) => go({ [key]: event.target.value, ...more }) },
    ...options.map(([option, text]) => make("option",
      { value: option, selected: option === value ? "" : null }, text)));
}

function outcome(found, runs, sides) {
  const signed = (value) => `${value > 0 ? "+" : ""}${number(value)}`;
  const sure = ([low, high]) => (low > 0 ? "good" : high < 0 ? "bad" : "");
  const rows = found.modes.map((one) => [one.mode, number(one.questions),
    ...one.means.map((mean) => number(mean)),
    make("td", { class: sure(one.interval) },
      `${signed(one.difference)} (${one.interval.map(signed).join(" to ")})`),
    `${one.wins} better, ${one.losses} worse, ${one.questions - one.wins - one.losses} the same`]);
  const heads = sides.map((run, at) => `${runs[run].name}, step ${number(found.steps[at])}`);
  return [...found.warnings.map((text) => make("p", { class: "alert" }, text)),
    rows.length ? table(["mode", "questions", ...heads, "difference, paired (95%)", "question by question"],
      rows)
      : make("p", {}, "No validation has the same questions in both.")];
}

function flips(found, runs, sides) {
  const rows = found.flipped.map((one) => [make("td", { class: "text" }, one.sides[0].question),
    ...one.sides.map((side, at) => make("td", {},
      make("div", { class: "text" }, side.answer || "(no answer)"),
      link({ tab: "episodes", run: sides[at], uid: side.uid },
        `score ${number(side.score)}, ${one.mode}`))), one.sides[0].truth ?? ""]);
  const title = `${number(found.flips)} questions flipped between right and wrong`;
  return make("section", { class: "card" }, make("h2", {}, title), rows.length > 0 && table(
    ["question", ...sides.map((run, at) => `${runs[run].name}, step ${number(found.steps[at])}`),
      "ground truth"], rows));
}

function differing(state) {
  const rows = Object.entries(state.differences).map(([key, values]) =>
    [make("code", {}, key), ...values.map(setting)]);
  if (state.runs.length < 2) return null;
  const title = `${rows.length} ${rows.length === 1 ? "key differs" : "keys differ"}; all others are equal`;
  const found = table(["key", ...state.runs.map((run) => run.name)], rows, { id: "differences" });
  return make("section", { class: "card" }, fold(title, true, found));
}
