// The tab of time: what each process did when, in a window of seconds since the start.
import { make } from "view/dom.js";
import { draw } from "view/lanes.js";
import { ask, isFile } from "view/source.js";

let window_ = { run: 0, from: "", to: "" };
let shown = null; // what was asked for last: asked again only when it changes

export async function refresh(state) {
  const place = document.getElementById("time");
  if (!place.firstChild) setup(place, state);
  const wanted = JSON.stringify(window_);
  if (wanted === shown) return;
  shown = wanted;
  const data = await ask("lanes", window_);
  draw(document.getElementById("lanes"), data);
}

function setup(place, state) {
  const change = (key, value) => ((window_ = { ...window_, [key]: value }), refresh(state).catch(show));
  const field = (key) => make("input", { placeholder: `${key}, seconds`, onchange: (event) => change(key, event.target.value) });
  const runs = make("select", { title: "run", onchange: (event) => change("run", Number(event.target.value)) }, ...state.runs.map((run, at) => make("option", { value: at }, run.name)));
  const again = make("button", { onclick: () => ((shown = null), refresh(state).catch(show)) }, "again");
  const fields = isFile ? [] : [field("from"), field("to"), again];
  place.append(make("div", { class: "bar" }, runs, ...fields), make("div", { id: "lanes" }));
}

function show(error) {
  const place = document.getElementById("error");
  place.textContent = error.message;
  place.hidden = false;
}
