// Elements are made of text here: nothing of a run is ever read as HTML. Figures have at most three digits.

const missing = (value) => value === null || value === undefined || Number.isNaN(value);
export const byId = (id) => document.getElementById(id);
const shown = (value) => value !== false && value !== null && value !== undefined;

export function make(tag, attributes = {}, ...children) {
  const [, drawn] = tag.split("svg:"), space = "http://www.w3.org/2000/svg";
  const element = drawn ? document.createElementNS(space, drawn) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (shown(value)) element.setAttribute(name, value);
  }
  element.append(...children.filter(shown));
  return element;
}

/** [word, texts, meaning] of asyncrl/observe/words.yaml, and the meanings by text. */
export const WORDS = JSON.parse(document.getElementById("words").textContent);
export const MEANINGS = Object.assign(Object.create(null), Object.fromEntries(
  WORDS.flatMap(([word, texts, meaning]) => texts.map((text) => [text, `${word}: ${meaning}`]))));

/** A text, with its meaning under the pointer if it has one. */
export const explained = (text) =>
  (MEANINGS[text] ? make("abbr", { title: MEANINGS[text] }, text) : text);

/** A path, which may continue on the next line after each slash. */
export function breakable(text) {
  const parts = String(text).split("/");
  return make("span", { class: "breakable" }, ...parts.flatMap((part, at) =>
    (at < parts.length - 1 ? [part + "/", make("wbr")] : [part])));
}

/** A part that opens at a click; functions among its children are called then. */
export function fold(title, open, ...children) {
  const later = children.filter((one) => typeof one === "function");
  const place = make("details", { open }, make("summary", {}, title),
    ...children.filter((one) => typeof one !== "function"));
  const fill = () => place.append(...later.splice(0).map((one) => one()));
  place.addEventListener("toggle", fill);
  if (open) fill();
  return place;
}

/** The folds in a place, by title; of those with the same title the first, the second, and so on. */
function folds(place) {
  const seen = {}, count = (title) => (seen[title] = (seen[title] ?? 0) + 1);
  const titled = [...place.querySelectorAll("details")].map((one) => [one.firstChild.textContent, one]);
  return new Map(titled.map(([title, one]) => [`${title} ${count(title)}`, one]));
}

/** Draw `data` into `place`, unless it is what is there. Scroll, focus and what was opened stay. */
const drawn = new WeakMap();
export function redraw(place, data, draw) {
  const text = JSON.stringify(data);
  if (drawn.get(place) === text) return;
  drawn.set(place, text);
  const open = new Map([...folds(place)].map(([title, one]) => [title, one.open]));
  const focused = place.contains(document.activeElement) ? document.activeElement.id : "";
  const { scrollTop, scrollLeft } = place;
  place.replaceChildren(...[draw(data)].flat().filter(Boolean));
  folds(place).forEach((one, title) => (one.open = open.get(title) ?? one.open));
  if (focused) byId(focused)?.focus({ preventScroll: true });
  Object.assign(place, { scrollTop, scrollLeft });
}

const UNITS = [[1e12, 1e12, "T"], [1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"], [0, 1, ""]];

/** A count with its noun: 1 turn, 2 turns. */
export const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

/** Three digits, thousands as 12.3k; whole numbers below 10,000 as they are. */
export function number(value, digits = 3) {
  if (missing(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e4) return value.toLocaleString("en");
  if (size < 1e-3) return value.toExponential(1);
  const [, unit, name] = UNITS.find(([least]) => size >= least);
  return `${Number((value / unit).toPrecision(digits)).toLocaleString("en")}${name}`;
}

export function percent(share) {
  if (missing(share)) return "–";
  const points = 100 * share;
  if (points > 0 && points < 0.1) return "<0.1%";
  if (points > 99 && points < 100) return `${Math.min(points, 99.9).toFixed(1)}%`;
  return `${Number(points.toPrecision(points < 10 ? 2 : 3))}%`;
}

/** A duration: 12 ms, 3.4 s, 2:05, 1:02:05. */
export function seconds(value) {
  if (missing(value)) return "–";
  if (value < 1) return `${number(value * 1000, 2)} ms`;
  return value < 60 ? `${Number(value.toPrecision(3))} s` : clock(value);
}

export function clock(value) {
  const whole = Math.round(value), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  const two = (part) => String(part).padStart(2, "0");
  return `${hours ? `${hours}:${two(minutes)}` : minutes}:${two(whole % 60)}`;
}

export function meter(share, text, hue = "var(--accent)") {
  const width = `${100 * Math.min(1, Math.max(0, share ?? 0))}%`;
  const inside = make("span", { style: { width, background: hue } });
  return make("span", { class: "meter", title: text, role: "img", "aria-label": text }, inside);
}

export const badge = (text, kind = "") => make("span", { class: `badge ${kind}` }, text);
export const swatch = (hue) => make("span", { class: "key", style: { background: hue } });

/** Says something beside a place of the window, at once: titles of thousands of elements come late. */
export const tip = make("div", { class: "tip", id: "tip" });
export function tell({ clientX, clientY }, ...children) {
  tip.replaceChildren(...children);
  document.body.append(tip);
  const wide = tip.offsetWidth + 12, left = clientX + wide > innerWidth ? clientX - wide : clientX + 12;
  Object.assign(tip.style, { left: `${Math.max(4, left)}px`, top: `${Math.max(4, clientY + 12)}px` });
}

export const card = (title, ...children) =>
  make("section", { class: "card" }, title && make("h2", {}, title), ...children);

export function table(head, rows, attributes = {}) {
  const cell = (kind, value) => (value?.tagName === kind ? value : make(kind, {}, value ?? "–"));
  const row = (kind, some) => (some.tagName ? some : make("tr", {}, ...some.map((one) => cell(kind, one))));
  return make("table", attributes, head && make("thead", {}, row("TH", head)),
    make("tbody", {}, ...rows.map((one) => row("TD", one))));
}

export const fail = (text) => Object.assign(byId("error"), { textContent: text, hidden: !text });

// Okabe and Ito: told apart with any colour vision. On white, orange and sky blue are darker: all have 3:1.
export const DARK = matchMedia("(prefers-color-scheme: dark)").matches;
export const FULL = DARK ? 50 : 70; // % of a colour behind text, which still has 4.5:1
export const PALETTE = DARK
  ? ["#3d9be0", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c"]
  : ["#0072b2", "#bf8400", "#009e73", "#cc79a7", "#3a96cf", "#d55e00", "#8c8c8c"];

/** The colour of a run, the same on every tab. */
export const hue = (run) => PALETTE[run % PALETTE.length];
