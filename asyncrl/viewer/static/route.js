// The page's state is its address: #tab=episodes&run=0&uid=12.3. Whoever gets the address sees the same.
import { make } from "view/dom.js";

const DEFAULTS = { tab: "overview", run: "0" };
const KEPT = ["run"]; // what another tab takes over

export function route() {
  return { ...DEFAULTS, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };
}

/** The address after some changes; null or "" takes a part out, and another tab begins anew. */
export function address(changes) {
  const now = route();
  const moved = changes.tab && changes.tab !== now.tab;
  const base = moved ? Object.fromEntries(KEPT.map((name) => [name, now[name]])) : now;
  const parts = Object.entries({ ...base, ...changes }).filter(([name, value]) => {
    const text = value === null || value === undefined ? "" : String(value);
    return text !== "" && text !== DEFAULTS[name];
  });
  return `#${new URLSearchParams(parts)}`;
}

/** Change the address. `replace`: the browser's back button skips what was there. */
export function go(changes, replace = false) {
  const next = address(changes);
  if (next === (location.hash || "#")) return;
  history[replace ? "replaceState" : "pushState"](null, "", next);
  dispatchEvent(new HashChangeEvent("hashchange"));
}

export function link(changes, ...children) {
  return make("a", { href: address(changes) }, ...children);
}
