// The page: its tabs, its keys, and what is asked again while a run goes on.
import { clock, fail, make, redraw, swatch, hue } from "view/dom.js";
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
const element = (id) => document.getElementById(id);

let state = null; // the newest answer to `runs`
let heard = 0; // when it came
let drawing = 0; // only the newest drawing goes on after it has waited for an answer

async function refresh() {
  const mine = ++drawing;
  const now = route(), here = location.hash; // links are made of it, and it changes before anybody hears of it
  const tab = TABS[now.tab] ? now.tab : "overview";
  document.querySelectorAll("main > section").forEach((one) => (one.hidden = one.id !== tab));
  try {
    if (!isFile || !state) state = await ask("runs");
    heard = Date.now();
    fail("");
    header(tab, now);
    await TABS[tab].show(element(tab), now, state, () => mine === drawing && here === location.hash);
    if (mine === drawing) document.body.dataset.ready = tab;
  } catch (error) {
    if (mine === drawing) fail(error.message);
  }
  told();
}

function header(tab, now) {
  const tabs = Object.keys(TABS);
  redraw(element("tabs"), [tabs, tab, now.run], () => tabs.map((name, at) => make("a", {
    href: address({ tab: name }), "aria-current": name === tab ? "page" : null, "data-tab": name, title: `key ${at + 1}`,
  }, name[0].toUpperCase() + name.slice(1))));
  const runs = state.runs.map((one) => one.name);
  redraw(element("runs"), [runs, now], () => runs.map((name, at) => make("a", {
    href: address({ run: at, uid: null, group: null }), "aria-current": String(at) === now.run ? "true" : null,
  }, swatch(hue(at)), name)));
  const one = state.runs[now.run] ?? state.runs[0];
  document.title = `${one.name} · asyncrl`;
  const left = one.eta === null ? "" : `, ${clock(one.eta)} left`;
  const steps = one.total_steps ? `step ${one.step} of ${one.total_steps}` : "no step yet";
  const doing = one.ended.split(":")[0] || one.phase;
  element("state").textContent = `${doing} · ${steps} · ${clock(one.seconds)}${left}`;
}

/** How old what is shown is, and whether the server still answers. */
function told() {
  const age = Math.round((Date.now() - heard) / 1000);
  const over = state?.runs.every((one) => one.ended);
  const gone = !isFile && heard && age > LATE && !(over && element("error").hidden);
  element("age").textContent = isFile ? `saved ${saved}` : over ? "ended" : `${age} s ago`;
  element("age").classList.toggle("bad", gone);
}

async function watch() {
  const goesOn = !state?.runs.every((one) => one.ended) || !element("error").hidden;
  if (!document.hidden && goesOn) await refresh();
  setTimeout(watch, EVERY);
}

function help() {
  const dialog = element("help");
  dialog.open ? dialog.close() : dialog.showModal();
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, select, textarea");
  if (typing && event.key === "Escape") typing.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const names = Object.keys(TABS);
  const tab = names[Number(event.key) - 1];
  const act = tab ? () => go({ tab }) : event.key === "?" ? help : TABS[route().tab]?.keys?.[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});
addEventListener("hashchange", refresh);
addEventListener("popstate", refresh);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload()); // canvases are painted
element("help-button").addEventListener("click", help);
refresh();
setInterval(told, 1000);
if (!isFile) setTimeout(watch, EVERY);
