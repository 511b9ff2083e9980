// The page: its tabs, its keys, and what is asked again while a run goes on.
import { WORDS, byId, clock, fail, hue, make, redraw, swatch } from "view/dom.js";
import { address, go, route } from "view/route.js";
import { ask, isFile, saved } from "view/source.js";
import * as compare from "view/compare.js";
import * as charts from "view/curves.js";
import * as episodes from "view/episodes.js";
import * as overview from "view/overview.js";
import * as time from "view/time.js";

const EVERY = 3000; // milliseconds between two looks at a run that goes on
const LATE = 15; // seconds without an answer from which on the page says so
const TABS = { overview, episodes, charts, time, compare };
const NAMES = Object.keys(TABS);

let state = null; // the newest answer to `runs`
let heard = Date.now(); // when it came
let drawing = 0; // only the newest drawing goes on after it has waited for an answer

async function refresh() {
  const mine = ++drawing, now = route(), tab = TABS[now.tab] ? now.tab : "overview";
  const here = location.hash; // links are made of it, and it changes before anybody hears of it
  NAMES.forEach((name) => (byId(name).hidden = name !== tab));
  try {
    if (!isFile || !state) state = await ask("runs");
    if (mine !== drawing) return; // what a newer one has said of the server stays
    heard = Date.now();
    fail("");
    header(tab, now);
    await TABS[tab].show(byId(tab), now, state, () => mine === drawing && here === location.hash);
    if (mine === drawing) document.body.dataset.ready = tab;
  } catch (error) {
    if (mine === drawing) fail(error.message);
  }
  told();
}

function header(tab, now) {
  redraw(byId("tabs"), [tab, now.run], () => NAMES.map((name, at) => make("a", {
    href: address({ tab: name }), "aria-current": name === tab && "page", title: `key ${at + 1}`,
  }, name[0].toUpperCase() + name.slice(1))));
  const one = state.runs[now.run] ?? state.runs[0], { total_steps: total, ended, phase } = one;
  const names = state.runs.map((run) => run.name);
  redraw(byId("runs"), [names, now], () => names.map((name, at) => make("a", {
    href: address({ run: at, uid: null }), "aria-current": state.runs[at] === one && "true",
  }, swatch(hue(at)), name)));
  document.title = `${one.name} · asyncrl`;
  const facts = [ended.split(":")[0] || phase, total ? `step ${one.step} of ${total}` : phase === "starting" ? "no step yet" : "evaluation",
    clock(one.seconds), one.eta !== null && `${clock(one.eta)} left`];
  byId("state").textContent = facts.filter(Boolean).join(" · ");
}

const isOver = () => state?.runs.every((one) => one.ended);

/** How old what is shown is, and whether the server still answers. */
function told() {
  const age = Math.round((Date.now() - heard) / 1000);
  byId("age").textContent = isFile ? `saved ${saved}` : isOver() ? "ended" : `${age} s ago`;
  byId("age").className = !isFile && !isOver() && age > LATE ? "bad" : "dim";
}

async function watch() {
  if (!document.hidden && !(isOver() && byId("error").hidden)) await refresh();
  setTimeout(watch, EVERY);
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, select, textarea");
  if (typing && ["Enter", "Escape"].includes(event.key) && !event.isComposing) typing.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const tab = NAMES[event.key - 1], help = () => byId("help").togglePopover();
  const act = tab ? () => go({ tab }) : event.key === "?" ? help : TABS[route().tab]?.keys?.[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});
byId("main").append(...NAMES.map((id) => make("section", { id, hidden: "" })));
byId("glossary").append(...WORDS.flatMap(([word, , meaning]) =>
  [make("dt", {}, word), make("dd", {}, meaning)]));
addEventListener("hashchange", refresh);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload()); // canvases
refresh();
setInterval(told, 1000);
if (!isFile) setTimeout(watch, EVERY);
