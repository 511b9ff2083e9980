// The tab of the summary: tables with a column for each run, and transcripts before and after.
import { fold, make } from "view/dom.js";
import { ask } from "view/source.js";

export async function show(place, route, state) {
  const names = state.runs.map((run) => run.name);
  const answers = await Promise.all(names.map((_, run) => ask("summary", { run })));
  const several = names.length > 1;
  const [results, ...tables] = answers[0].tables.map((_, at) => table(names, answers.map((answer) => answer.tables[at])));
  const notes = answers.flatMap((answer, run) => answer.notes.map((note) => make("p", {}, several ? `${names[run]}: ${note}` : note)));
  const texts = answers.flatMap((answer, run) => [
    make("h3", {}, `Transcripts${several ? ` of ${names[run]}` : ""}: first and last validation`),
    ...(answer.transcripts.length ? answer.transcripts.map(transcript) : [make("p", {}, "no validation has kept any")]),
  ]);
  place.replaceChildren(...results, ...notes, ...tables.flat(), ...texts);
}

function table(names, found) {
  const keys = [...new Set(found.flatMap((one) => Object.keys(one.rows)))];
  const cells = (kind, texts) => make("tr", {}, ...texts.map((text) => make(kind, {}, text)));
  const rows = keys.map((key) => cells("td", [key, ...found.map((one) => one.rows[key] ?? one.default)]));
  return keys.length ? [make("h3", {}, found[0].title), make("table", {}, cells("th", ["", ...names]), ...rows)] : [];
}

function transcript({ title, texts }) {
  const parts = texts.map(([caption, text]) => make("div", {}, make("b", {}, caption), make("div", { class: "text" }, text)));
  return fold(title, false, make("div", { class: "side" }, ...parts));
}
