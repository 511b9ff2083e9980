// The tab of time: what each process did when. A window that is zoomed into is asked for again, with finer spans.
import { fail, make } from "view/dom.js";
import { picture } from "view/lanes.js";
import { ask, isFile } from "view/source.js";

let view = null;
let run = 0;
let asked = 0; // answers of earlier questions are not drawn

export async function refresh(state) {
  if (!view) {
    setup(document.getElementById("time"), state);
    await load();
  }
}

async function load(shown = null) {
  const mine = ++asked;
  const data = await ask("lanes", shown ? { run, from: shown[0], to: shown[1] } : { run });
  if (mine === asked) view.draw(data, shown ? null : [0, Math.max(data.end - data.start, 1e-3)]);
}

function setup(place, state) {
  const again = (shown) => load(shown).then(() => fail(""), (error) => fail(error.message));
  const typed = () => view.show([Number(from.value) || 0, Number(to.value) || Infinity]);
  const field = (label) => make("input", { title: label, onchange: typed });
  const [from, to] = [field("from, seconds"), field("to, seconds")];
  const runs = make("select", { title: "run", onchange: (event) => ((run = Number(event.target.value)), again()) }, ...state.runs.map((one, at) => make("option", { value: at }, one.name)));
  const all = make("button", { onclick: () => again() }, "all, again");
  const lanes = make("div", { id: "lanes" });
  place.append(make("div", { class: "bar" }, runs, "seconds", from, "to", to, all), lanes);
  view = picture(lanes, (shown, ended) => {
    [from.value, to.value] = shown.map((at) => at.toFixed(3));
    if (ended && !isFile) again(shown);
  });
}
