// The tab of a comparison: outcomes of runs, tasks of evaluations, questions that flipped, configurations.
import { card, counted, explained, fold, hue, make, number, redraw, swatch, table } from "view/dom.js";
import { settingsOf } from "view/curves.js";
import { judged, keyed, setting } from "view/overview.js";
import { go, link } from "view/route.js";
import { ask } from "view/source.js";

const MEASURE = "sampled/success"; // of tasks, unless another one is chosen
const NOTE = "Held out: last validation, with 95% intervals. Training: last tenth of the steps. Seeds: mean and range.";
const TRAINED = ["rollout/score/mean", "actor/nll"]; // metrics of training
const FEW = 24; // tasks that are not folded
const EMPTY = { held_out: [], figures: [], configuration: [] }; // of a run whose overview is not there yet

const known = new Map(); // of each run: how much it had written, and its overview

/** Overviews come one by one, again once a run has written more: a long run takes half a second. */
export async function show(place, now, state, current) {
  const { runs, differences } = state, names = runs.map((run) => run.name);
  const sides = [Number(now.a ?? 0), Number(now.b ?? Math.min(1, runs.length - 1))];
  const found = await ask("compare", { a: sides[0], b: sides[1], from: now.from, to: now.to })
    .catch((error) => ({ error: `the questions cannot be compared: ${error.message}` }));
  const heads = sides.map((run, at) => `${names[run]}, step ${number(found.steps?.[at])}`);
  const draw = () => {
    const answers = runs.map((_, run) => known.get(run)?.answer ?? EMPTY);
    redraw(place, [found, sides, now.mode, now.measure, answers, names, differences], () => [
      runs.length > 1 && outcomes(state, answers),
      tasks(names, answers, now.measure ?? MEASURE),
      card("Question by question", chooser(names, sides, found),
        ...(found.error ? [make("p", { class: "alert" }, found.error)] : paired(found, names, sides, heads))),
      runs.length > 1 && differing(names, differences), // before what may be long
      found.modes?.length > 0 && flips(found, sides, heads, now.mode),
    ]);
  };
  if (current()) draw();
  for (const [run, { rows, ended }] of runs.entries()) {
    const written = `${rows} ${ended}`;
    if (!current() || known.get(run)?.written === written) continue;
    known.set(run, { written, answer: await ask("overview", { run }).catch(() => EMPTY) });
    if (current()) draw();
  }
}

/** A run's name, and its agent program's. */
function named(name, { configuration }, at) {
  const [key, value] = configuration.find(([one]) => /^rollout\.agent(\.|$)/.test(one)) ?? [];
  return make("span", {}, swatch(hue(at)), name, key && ` (${key.split(".")[2] ?? value})`);
}

/** What came of each run; of the seeds of one setting their mean, and from the lowest to the highest. */
function outcomes(state, answers) {
  const numbers = answers.map(({ held_out: held, figures, steps, seconds }) => Object.fromEntries([
    ...held.filter((one) => !one.part).map((one) =>
      [one.title ?? one.label, { ...(one.after ?? one.before), unit: one.unit }]),
    ...figures.filter((one) => !one.part && TRAINED.includes(one.metric))
      .map((one) => [`${one.label} (training)`, { value: one.last }]),
    ["steps", { value: steps }], ["time", { value: seconds, unit: "s" }]]));
  const names = [...new Set(numbers.flatMap(Object.keys))];
  const row = (head, found, kind) => make("tr", { class: kind }, make("th", { scope: "row" }, head),
    ...names.map((name) => make("td", {}, judged(found[name], found[name]?.unit))));
  const rows = settingsOf(state).flatMap(({ of, name }) => [
    of.length > 1 && row(name, together(of.map((at) => numbers[at]), names)),
    ...of.map((at) =>
      row(named(state.runs[at].name, answers[at], at), numbers[at], of.length > 1 ? "part" : "")),
  ]).filter(Boolean);
  return card("Outcomes", table(["", ...names.map(explained)], rows),
    make("p", { class: "dim small" }, NOTE));
}

function together(seeds, names) {
  return Object.fromEntries(names.map((name) => {
    const known = seeds.map((seed) => seed[name]).filter(Boolean), values = known.map((one) => one.value);
    const value = values.reduce((sum, one) => sum + one, 0) / values.length;
    const ends = [Math.min(...values), Math.max(...values)];
    return [name, { ...known[0], value, interval: ends[0] < ends[1] && ends }];
  }));
}

/** Of evaluations, by a measure: a column for each model or agent, and its difference from the first. */
function tasks(names, answers, measure) {
  const own = answers.map(({ held_out: held }) => held.find((one) => one.label === measure)?.tasks ?? {});
  const of = names.map((_, at) => at).filter((at) => Object.keys(own[at]).length);
  if (!of.length) return null;
  const all = [...new Set(of.flatMap((at) => Object.keys(own[at])))];
  const rows = all.map((task) => [task, ...of.map((at) => {
    const sign = Math.sign(own[at][task] - own[of[0]][task]) || 0;
    const [kind, mark] = [["bad", " ▼"], ["", ""], ["good", " ▲"]][sign + 1];
    return make("td", { class: kind }, number(own[at][task]) + mark);
  })]);
  const measures = answers[of[0]].held_out.filter((one) => Object.keys(one.tasks).length);
  return card(`Tasks by ${measure}`, choices("measure", measures.map((one) => one.label), measure),
    fold(counted(all.length, "task"), all.length <= FEW,
      table(["task", ...of.map((at) => named(names[at], answers[at], at))], rows)));
}

const choices = (key, names, chosen) => make("div", { class: "bar small" }, ...names.map((name) =>
  link({ [key]: name || null }, make(name === chosen ? "b" : "span", {}, name || "all"))));

function chooser(names, sides, found) {
  const choice = (key, options, chosen, more) => make("select", { id: `compare-${key}`, "aria-label": key,
    onchange: (event) => go({ [key]: event.target.value, ...more }) }, ...options.map(([value, text]) =>
    make("option", { value, selected: value === chosen ? "" : null }, text)));
  const one = (at, key, step) => make("span", {}, swatch(hue(sides[at])),
    choice(key, names.map((name, run) => [run, name]), sides[at], { [step]: null }), " step ",
    choice(step, (found.validations?.[at] ?? []).map((own) => [own, number(own)]), found.steps?.[at]));
  return make("div", { class: "bar" }, one(0, "a", "from"), make("b", {}, "→"), one(1, "b", "to"));
}

function paired(found, names, sides, heads) {
  const signed = (value) => `${value > 0 ? "+" : ""}${number(value)}`;
  const row = (name, { questions, means, difference, interval, wins, losses }, kind) =>
    make("tr", { class: kind }, ...[name, number(questions), ...means.map((mean) => number(mean))]
      .map((cell) => make("td", {}, cell)),
    make("td", { class: interval[0] > 0 ? "good" : interval[1] < 0 ? "bad" : "" },
      `${signed(difference)} (${interval.map(signed).join(" to ")})`),
    make("td", {}, `${wins} better, ${losses} worse, ${questions - wins - losses} the same`));
  const rows = found.modes.flatMap((one) => [row(`score, ${one.mode}`, one),
    ...Object.entries(one.components).map(([name, part]) => row(name, part, "part"))]);
  const without = sides.filter((_, at) => !found.validations[at].length).map((run) => names[run]);
  const none = without.length ? `No validation in ${without.join(" and ")}: set data.test to run one.`
    : "The two runs have no questions in common.";
  const head = ["", "questions", ...heads, "paired difference (95%)", "question by question"];
  return [...found.warnings.map((text) => make("p", { class: "alert" }, text)),
    rows.length ? table(head, rows) : make("p", {}, none)];
}

/** Questions that were answered rightly and no longer are, and the other way round. */
function flips(found, sides, heads, mode = "") {
  const own = found.modes.filter((one) => !mode || one.mode === mode);
  const modes = found.modes.map((one) => one.mode);
  const row = (both, of) => {
    const [before, after] = both.map((one) => one.components);
    const changed = Object.keys(before).filter((name) => name in after && before[name] !== after[name]);
    return [make("td", { class: "text" }, both[0].question),
      ...both.map((one, at) => make("td", {}, make("div", { class: "text" }, one.answer || "(no answer)"),
        link({ tab: "episodes", run: sides[at], uid: one.uid }, `score ${number(one.score)}, ${of}`))),
      both[0].truth,
      changed.map((name) => `${name} ${number(before[name])} → ${number(after[name])}`).join(", ")];
  };
  const list = (kind) => {
    const count = own.reduce((sum, one) => sum + one.flips[kind], 0);
    const rows = own.flatMap((one) => one[kind].map((both) => row(both, one.mode)));
    const some = count > rows.length ? `, first ${rows.length} shown` : "";
    return [make("h3", {}, `${kind}: ${number(count)}${some}`),
      count > 0 && table(["question", ...heads, "ground truth", "changed components"], rows)];
  };
  return card("Questions that flipped between right and wrong",
    modes.length > 1 && choices("mode", ["", ...modes], mode), ...list("lost"), ...list("won"));
}

function differing(names, differences) {
  const rows = Object.entries(differences).map(([key, values]) =>
    [make("code", {}, keyed(key)), ...values.map(setting)]);
  const same = make("p", { class: "dim" }, "All keys have the same values.");
  if (!rows.length) return card("Configuration", same);
  const found = table(["key", ...names], rows, { id: "differences" });
  return card("Configuration", fold(`${counted(rows.length, "key")} with different values`, true, found));
}
