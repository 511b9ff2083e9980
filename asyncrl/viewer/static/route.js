// The page's state is its address: #tab=episodes&run=0&uid=12.3. Whoever gets the address sees the same.
import { make } from "view/dom.js";

const DEFAULTS = { tab: "overview", run: "0" };

export const route = () =>
  ({ ...DEFAULTS, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) });

/** The address after some changes; null or "" takes a part out, and another tab takes over only the run. */
export function address(changes) {
  const now = route(), base = (changes.tab ?? now.tab) === now.tab ? now : { run: now.run };
  const given = ([name, value]) => !["", DEFAULTS[name]].includes(String(value ?? ""));
  return `#${new URLSearchParams(Object.entries({ ...base, ...changes }).filter(given))}`;
}

/** Change the address. `replace`: the browser's back button skips what was there. */
export const go = (changes, replace = false) => location[replace ? "replace" : "assign"](address(changes));

let timer = 0;
/** Change it when nothing was typed or dragged for some milliseconds: what is passed over is not kept. */
export function goLater(changes, wait) {
  clearTimeout(timer);
  timer = setTimeout(() => go(changes, true), wait);
}

export const link = (changes, ...children) => make("a", { href: address(changes) }, ...children);
