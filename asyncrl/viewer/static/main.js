// The page: its tabs, its keys, and what is asked again while a run goes on.
import { clock, fail } from "view/dom.js";
import * as episodes from "view/episodes.js";
import * as run from "view/run.js";
import { ask, isFile } from "view/source.js";
import * as summary from "view/summary.js";
import * as time from "view/time.js";

const EVERY = 3000; // milliseconds between two looks at a run that goes on
const TABS = ["run", "episodes", "time", "summary"];

let state = null;
let tab = "run";

function open(name) {
  tab = name;
  TABS.forEach((one) => (document.getElementById(one).hidden = one !== name));
  document.querySelectorAll("[data-tab]").forEach((button) => button.setAttribute("aria-selected", String(button.dataset.tab === name)));
  refresh();
}

async function refresh() {
  try {
    state = await ask("runs");
    fail("");
    document.getElementById("state").textContent = state.runs.map(line).join(" | ");
    document.getElementById("state").title = state.runs.map((one) => [one.path, one.flow, one.alert, one.failed, ...one.waits].filter(Boolean).join("\n")).join("\n\n");
    if (tab === "run") await run.refresh(state);
    if (tab === "episodes") {
      if (!document.getElementById("filters")) episodes.setup(state);
      await episodes.refresh();
    }
    if (tab === "time") await time.refresh(state);
    if (tab === "summary") await summary.refresh(state);
    document.body.dataset.ready = tab;
  } catch (error) {
    fail(error.message);
  }
}

function line(one) {
  const left = one.eta === null ? "" : `, ETA ${clock(one.eta)}`;
  return `${one.name}: ${one.ended || one.phase}, step ${one.step} of ${one.total_steps} after ${clock(one.seconds)}${left}${one.numbers && ` · ${one.numbers}`} · ${one.flow}`;
}

async function watch() {
  if (tab === "run" && !document.hidden && !state?.runs.every((one) => one.ended)) await refresh();
  setTimeout(watch, EVERY);
}

function help() {
  const dialog = document.getElementById("help");
  dialog.open ? dialog.close() : dialog.showModal();
}

const KEYS = {
  1: () => open("run"),
  2: () => open("episodes"),
  3: () => open("time"),
  4: () => open("summary"),
  j: () => tab === "episodes" && episodes.next(1),
  k: () => tab === "episodes" && episodes.next(-1),
  g: () => tab === "episodes" && episodes.group(),
  "/": () => (tab === "episodes" ? document.querySelector("#filters input") : document.getElementById("add-metric"))?.focus(),
  "?": help,
};

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, select, textarea");
  if (typing && event.key === "Escape") typing.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});
document.querySelectorAll("[data-tab]").forEach((button) => button.addEventListener("click", () => open(button.dataset.tab)));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload()); // canvases are painted
document.getElementById("help-button").addEventListener("click", help);
open(TABS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "run");
if (!isFile) setTimeout(watch, EVERY);
