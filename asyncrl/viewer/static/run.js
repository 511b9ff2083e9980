// The tab of curves: what a run earns, how old its tokens are, who waits, what the loss does.
import { bars, lines } from "view/charts.js";
import { PALETTE, fold, make, number } from "view/dom.js";
import { ask } from "view/source.js";

const CHARTS = [
  ["Reward, before shaping", { "rollout/score/mean": "mean of landed", "critic/score/mean": "of trained" }],
  ["Success, held out", { "val-core/all/sampled/success": "sampled", "val-core/all/greedy/success": "greedy" }],
  ["Score, held out", { "val-core/all/sampled/mean@1": "sampled", "val-core/all/greedy/mean@1": "greedy" }],
  ["Loss per token (supervised)", { "actor/nll": "training", "val-core/all/nll": "held out" }],
  ["Lag, in steps", { "staleness/lag/mean": "mean", "staleness/lag/p95": "p95", "staleness/lag/max": "max" }],
  ["Masked tokens, share", { "staleness/masked_token_frac": "too old", "rollout_corr/rollout_rs_masked_fraction": "by the correction" }],
  ["Idle, share of time", { "async/trainer_idle_frac": "trainer", "async/rollout_idle_frac": "rollout" }],
  ["Flow, episodes", { "flow/issued": "issued", "flow/trained": "trained", "flow/filtered": "filtered", "flow/dropped": "dropped", "flow/failed": "failed" }],
  ["Not over, episodes", { "flow/in_flight": "in flight", "flow/ready": "ready", "flow/taken": "taken" }],
  ["Tokens per second", { "rollout/tokens_per_s": "generated", "perf/throughput": "trained, with prompts, of a rank" }],
  ["Seconds per step", { "timing_s/step": "step", "timing_s/wait_data": "waiting for data", "timing_s/update_actor": "training", "timing_s/update_weights": "new version" }],
  ["Policy loss", { "actor/pg_loss": "loss" }],
  ["Gradient norm", { "actor/grad_norm": "norm" }],
  ["Entropy, nats per token", { "actor/entropy": "entropy" }],
  ["KL, nats per token", { "rollout_corr/kl": "engine to policy", "actor/ppo_kl": "of the step", "actor/kl_loss": "to the reference" }],
  ["Effective sample size, share", { "rollout_corr/rho_eff_sample_size": "tokens", "rollout_corr/rho_seq_eff_sample_size": "episodes" }],
  ["Log-prob gap of one version", { "rollout_corr/logprob_diff_mean": "mean", "rollout_corr/logprob_diff_max": "max" }],
  ["Response, tokens", { "rollout/response_length/mean": "mean", "rollout/response_length/max": "max" }],
  ["Ends, share", { "rollout/end/answered": "answered", "rollout/end/length": "length", "rollout/end/max_turns": "turns", "rollout/end/bad_calls": "bad calls", "rollout/end/timeout": "timeout" }],
];
const X = { step: "step", tokens: "tokens trained", seconds: "seconds" };

let shownBy = "step";
let extra = [];
let shown = null; // how many bytes of metrics there were: until there are more nothing is asked for

export async function refresh(state) {
  const now = JSON.stringify(state.runs.map((run) => [run.rows, run.ended, run.alert]));
  if (now === shown) return;
  const answers = await Promise.all(state.runs.map((_, run) => ask("rows", { run })));
  draw(state, answers);
  shown = now;
}

// Runs without `rollout/tokens_per_s` are older: they recorded it as `perf/throughput`.
const renamed = ({ "perf/throughput": old, ...rest }) => ({ "rollout/tokens_per_s": old, ...rest, ...("rollout/tokens_per_s" in rest && { "perf/throughput": old }) });

function draw(state, answers) {
  const names = state.runs.map((run) => run.name);
  if (!document.getElementById("charts")) setup(names);
  const tables = answers.map((answer) => ({ x: answer[shownBy], columns: renamed(answer.columns) }));
  const again = () => draw(state, answers);
  const all = [...new Set(answers.flatMap((answer) => Object.keys(answer.columns)))].sort();
  const add = document.getElementById("add-metric");
  add.onchange = () => {
    if (all.includes(add.value)) ((extra = [add.value, ...extra.filter((name) => name !== add.value)]), (add.value = ""), again());
  };
  document.getElementById("x-axis").onchange = (event) => ((shownBy = event.target.value), again());
  document.getElementById("metrics").replaceChildren(...all.map((name) => make("option", { value: name })));
  const own = extra.map((name) => [name, { [name]: name.split("/").at(-1) }]);
  const parts = all.map((name) => [name, name.match(/^(?:rollout\/component\/(.*)\/mean|val-aux\/all\/sampled\/(.*)\/mean@1)$/)]).filter(([, found]) => found);
  const components = Object.fromEntries(parts.map(([name, found]) => [name, found[1] ?? `${found[2]}, held out`]));
  const charts = [...own, ["Components of the reward", components], ...CHARTS].map(([title, metrics]) => lines(title, metrics, tables, names, { label: X[shownBy] }));
  const lags = answers.map((answer, at) => bars(names.length > 1 ? `Tokens by lag: ${names[at]}` : "Tokens by lag, all steps", "lag", answer.lags));
  document.getElementById("alerts").replaceChildren(...answers.flatMap((answer, at) => answer.alerts.map((alert) => warning(names[at], alert))));
  const empty = answers.some((answer) => answer.step.length) ? [] : [make("p", {}, "No step is over yet.")];
  document.getElementById("charts").replaceChildren(...[...charts, ...lags].filter(Boolean), ...empty);
  document.getElementById("differing").replaceChildren(...differences(names, state.differences));
}

// What stays when there are new answers: somebody may be typing.
function setup(names) {
  const select = make("select", { title: "x axis", id: "x-axis" }, ...Object.entries(X).map(([key, label]) => make("option", { value: key }, label)));
  const add = make("input", { list: "metrics", placeholder: "add a metric…", id: "add-metric", style: { width: "18rem" } });
  const legend = names.length > 1 ? names.map((name, at) => make("span", {}, make("span", { class: "key", style: { background: PALETTE[at % PALETTE.length] } }), name)) : [];
  document.getElementById("run").replaceChildren(
    make("div", { id: "alerts" }),
    make("div", { class: "bar" }, "x:", select, add, make("datalist", { id: "metrics" }), ...legend),
    make("div", { class: "charts", id: "charts" }),
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
