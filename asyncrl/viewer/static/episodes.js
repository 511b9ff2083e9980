// The tab of episodes: a filtered list, page by page, and the chosen one, or its whole group side by side.
import { fail, make, number } from "view/dom.js";
import { ask, isFile } from "view/source.js";
import { COLOURS, draw } from "view/transcript.js";

const COLUMNS = ["uid", "state", "reason", "step", "reward", "end", "tokens", "turns", "calls", "lag", "seconds"];
const STATES = ["", "pending", "running", "landed", "ready", "taken", "trained", "filtered", "dropped", "failed"];
const ENDS = ["", "answered", "done", "length", "max_turns", "max_calls", "max_rows", "bad_calls", "timeout"];
const ORDERS = ["", "reward", "-reward", "tokens", "-tokens", "-lag"];
const RANGES = { step: "step", reward: "reward", length: "tokens" };
const PAGE = 100;

const wanted = { run: 0, start: 0 };
let listed = [];
let total = 0; // that fit, on all pages
let chosen = -1;
let colour = "logprobs";
let open = []; // episodes that are shown
const asked = { list: 0, open: 0 }; // answers of earlier questions are not shown

function setup(state) {
  const place = document.getElementById("episodes");
  const change = (key, value) => ((wanted[key] = value), (wanted.start = key === "start" ? value : 0), refresh());
  const field = (key, label) => make("input", { placeholder: label, title: label, "data-key": key, onchange: (event) => change(key, event.target.value) });
  const choice = (key, values, label) =>
    make("select", { title: label, "data-key": key, onchange: (event) => change(key, event.target.value) }, ...values.map((value) => make("option", { value }, value || `${label}: all`)));
  const runs = make("select", { title: "run", onchange: (event) => ((open = []), present(), change("run", Number(event.target.value))) }, ...state.runs.map((run, at) => make("option", { value: at }, run.name)));
  const colours = make("select", { title: "colour of tokens", id: "colour", onchange: (event) => ((colour = event.target.value), present()) }, ...Object.entries(COLOURS).map(([key, label]) => make("option", { value: key }, `colour: ${label}`)));
  place.replaceChildren(
    make("div", { class: "bar", id: "filters" }, runs, choice("state", STATES, "state"), choice("end", ENDS, "end"), field("reason", "reason"), field("step_from", "step from"), field("step_to", "step to"), field("reward_from", "reward from"), field("reward_to", "reward to"), field("length_from", "tokens from"), field("length_to", "tokens to"), field("group", "group"), isFile ? null : field("search", "search"), choice("order", ORDERS, "order")),
    make("div", { class: "dim", id: "counts" }),
    make("div", { class: "bar" }, make("button", { onclick: () => turn(-1) }, "‹"), make("span", { id: "place" }), make("button", { onclick: () => turn(1) }, "›"), make("button", { id: "group", onclick: () => group() }, "group side by side"), colours),
    make("div", { id: "list", tabindex: 0 }),
    make("div", { id: "transcript" }),
  );
  const turn = (by) => wanted.start + by * PAGE < total && change("start", Math.max(0, wanted.start + by * PAGE));
}

export async function show(place, route, state) {
  if (!document.getElementById("filters")) setup(state);
  await refresh();
}

export const keys = { j: () => next(1), k: () => next(-1), g: () => group(), "/": () => document.querySelector("#filters input")?.focus() };

// The conditions of the chosen fields, as the server reads them.
function conditions() {
  const equal = ["state", "end", "reason", "group"].map((name) => [name, "=", name === "group" ? Number(wanted[name]) : wanted[name]]);
  const ranges = Object.entries(RANGES).flatMap(([key, name]) => [[name, ">=", wanted[`${key}_from`]], [name, "<=", wanted[`${key}_to`]]]);
  const numbers = ranges.filter((one) => one[2]).map(([name, operator, value]) => [name, operator, Number(value)]);
  return JSON.stringify([...equal.filter(([name]) => wanted[name]), ...numbers]);
}

async function refresh() {
  const mine = ++asked.list;
  try {
    const answer = await ask("episodes", { run: wanted.run, start: wanted.start, order: wanted.order, search: wanted.search, where: conditions() });
    if (mine !== asked.list) return;
    fail("");
    [listed, total] = [answer.episodes, answer.total];
    chosen = listed.findIndex((episode) => episode.uid === open[0]?.uid);
    list(answer);
  } catch (error) {
    fail(error.message);
  }
}

function list(answer) {
  const rows = listed.map((episode, at) =>
    make("tr", { onclick: () => choose(at), "data-uid": episode.uid }, ...COLUMNS.map((name) => make("td", {}, typeof episode[name] === "number" ? number(episode[name]) : (episode[name] ?? "–")))),
  );
  document.getElementById("list").replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...COLUMNS.map((name) => make("th", {}, name)))), make("tbody", {}, ...rows)));
  const last = answer.start + listed.length;
  const searched = answer.searched === null ? "" : `; transcripts of the first ${number(answer.searched.transcripts)} of ${number(answer.searched.of)} were searched`;
  document.getElementById("place").textContent = `${listed.length ? answer.start + 1 : 0} to ${last} of ${number(answer.total)}${searched}`;
  document.getElementById("counts").textContent = answer.facets.filter((facet) => ["state", "reason"].includes(facet.column)).flatMap((facet) => facet.values.map((one) => `${number(one.count)} ${one.label}`)).join(" · ");
  mark();
}

function mark() {
  document.querySelectorAll("#list tbody tr").forEach((row, at) => row.setAttribute("aria-selected", String(at === chosen)));
  document.querySelector('#list tr[aria-selected="true"]')?.scrollIntoView({ block: "nearest" });
}

export async function choose(at) {
  if (at < 0 || at >= listed.length) return;
  chosen = at;
  mark();
  await load([listed[at].uid]);
}

export const next = (by) => choose(chosen + by);

export async function group() {
  if (!open.length) return;
  const members = await ask("episodes", { run: wanted.run, where: JSON.stringify([["group", "=", open[0].group]]) }).catch((error) => fail(error.message));
  if (members) await load(members.episodes.sort((a, b) => a.member - b.member).map((episode) => episode.uid));
}

async function load(uids) {
  const mine = ++asked.open;
  try {
    const found = await Promise.all(uids.map((uid) => ask("episode", { run: wanted.run, uid })));
    if (mine !== asked.open) return;
    fail("");
    open = found;
    present();
  } catch (error) {
    fail(error.message);
  }
}

function present() {
  const place = document.getElementById("transcript");
  place.className = open.length > 1 ? "side" : "";
  place.replaceChildren(...open.map((episode) => draw(episode, colour)));
}
