// The tab of curves: what a run earns, how old its tokens are, who waits, what the loss does.
import { bars, lines } from "view/charts.js";
import { PALETTE, fold, make, number } from "view/dom.js";
import { ask } from "view/source.js";

const X = { step: "step", tokens: "tokens trained", seconds: "seconds" };

let shownBy = "step";
let extra = [];
let shown = null; // how many bytes of metrics there were: until there are more nothing is asked for

export async function show(place, route, state) {
  const now = JSON.stringify(state.runs.map((run) => [run.rows, run.ended, run.alert]));
  if (now === shown) return;
  const answers = await Promise.all(state.runs.map((_, run) => ask("rows", { run })));
  draw(state, answers);
  shown = now;
}

function draw(state, answers) {
  const names = state.runs.map((run) => run.name);
  if (!document.getElementById("figures")) setup(names);
  const tables = answers.map((answer) => ({ x: answer[shownBy], columns: answer.columns }));
  const again = () => draw(state, answers);
  const all = [...new Set(answers.flatMap((answer) => Object.keys(answer.columns)))].sort();
  const add = document.getElementById("add-metric");
  add.onchange = () => {
    if (all.includes(add.value)) ((extra = [add.value, ...extra.filter((name) => name !== add.value)]), (add.value = ""), again());
  };
  document.getElementById("x-axis").onchange = (event) => ((shownBy = event.target.value), again());
  document.getElementById("metrics").replaceChildren(...all.map((name) => make("option", { value: name })));
  const own = extra.map((name) => [name, { [name]: name.split("/").at(-1) }]);
  const charts = {};
  answers.forEach((answer) => Object.entries(answer.charts).forEach(([title, names]) => (charts[title] = { ...charts[title], ...names })));
  const figures = [...own, ...Object.entries(charts)].map(([title, metrics]) => lines(title, metrics, tables, names, { label: X[shownBy] }));
  const lags = answers.map((answer, at) => bars(names.length > 1 ? `Tokens by lag: ${names[at]}` : "Tokens by lag, all steps", "lag", answer.lags));
  document.getElementById("alerts").replaceChildren(...answers.flatMap((answer, at) => answer.alerts.map((alert) => warning(names[at], alert))));
  const empty = answers.some((answer) => answer.step.length) ? [] : [make("p", {}, "No step is over yet.")];
  document.getElementById("figures").replaceChildren(...[...figures, ...lags].filter(Boolean), ...empty);
  document.getElementById("differing").replaceChildren(...differences(names, state.differences));
}

// What stays when there are new answers: somebody may be typing.
function setup(names) {
  const select = make("select", { title: "x axis", id: "x-axis" }, ...Object.entries(X).map(([key, label]) => make("option", { value: key }, label)));
  const add = make("input", { list: "metrics", placeholder: "add a metric…", id: "add-metric", style: { width: "18rem" } });
  const legend = names.length > 1 ? names.map((name, at) => make("span", {}, make("span", { class: "key", style: { background: PALETTE[at % PALETTE.length] } }), name)) : [];
  document.getElementById("charts").replaceChildren(
    make("div", { id: "alerts" }),
    make("div", { class: "bar" }, "x:", select, add, make("datalist", { id: "metrics" }), ...legend),
    make("div", { class: "charts", id: "figures" }),
    make("div", { id: "differing" }),
  );
}

function warning(run, alert) {
  return make("div", { class: "alert" }, make("b", {}, `${run}: ${alert.name}`), ` (step ${number(alert.step)}): ${alert.what}. `, make("span", { class: "dim" }, alert.do));
}

function differences(names, found) {
  if (names.length < 2) return [];
  const rows = Object.entries(found).map(([key, values]) => make("tr", {}, make("td", {}, make("code", {}, key)), ...values.map((value) => make("td", {}, JSON.stringify(value)))));
  const head = make("tr", {}, make("th", {}, "key"), ...names.map((name) => make("th", {}, name)));
  return [fold(`${rows.length} keys of the configurations differ`, true, make("table", { id: "differences" }, head, ...rows))];
}
