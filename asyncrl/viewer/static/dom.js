// Elements are made here, from text: nothing of a run is ever read as HTML. And figures: at most three digits.

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** A part that opens at a click. `id` keeps it open when what is around it is drawn anew. */
export function fold(title, open, ...children) {
  const id = typeof title === "string" ? title : title.textContent;
  return make("details", { open: open ? "" : null, "data-fold": id }, make("summary", {}, title), ...children);
}

/** Draw `data` into `place`, unless it is what is there. Scroll, focus and what was opened stay. */
const drawn = new WeakMap();
export function redraw(place, data, draw) {
  const text = JSON.stringify(data);
  if (drawn.get(place) === text) return;
  drawn.set(place, text);
  const folds = new Map([...place.querySelectorAll("[data-fold]")].map((one) => [one.dataset.fold, one.open]));
  const focused = place.contains(document.activeElement) ? document.activeElement.id : "";
  const { scrollTop, scrollLeft } = place;
  place.replaceChildren(...[draw(data)].flat().filter(Boolean));
  place.querySelectorAll("[data-fold]").forEach((one) => (one.open = folds.get(one.dataset.fold) ?? one.open));
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  Object.assign(place, { scrollTop, scrollLeft });
}

const missing = (value) => value === null || value === undefined || Number.isNaN(value);
const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]];

/** Three digits, thousands as 12.3k; whole numbers below 10,000 as they are. */
export function number(value, digits = 3) {
  if (missing(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e4) return value.toLocaleString("en");
  const [unit, name] = UNITS.find(([least]) => size >= least) ?? [1, ""];
  const scale = name === "k" ? 1e3 : unit;
  const scaled = Number((value / scale).toPrecision(digits));
  return size !== 0 && size < 1e-3 ? value.toExponential(1) : `${scaled.toLocaleString("en")}${name}`;
}

export function percent(share) {
  if (missing(share)) return "–";
  const points = 100 * share;
  if (points > 0 && points < 0.1) return "<0.1%";
  return `${points > 99 && points < 100 ? points.toFixed(1) : Number(points.toPrecision(points < 10 ? 2 : 3))}%`;
}

/** A duration: 12 ms, 3.4 s, 2:05, 1:02:05. */
export function seconds(value) {
  if (missing(value)) return "–";
  if (value < 1) return `${number(value * 1000, 2)} ms`;
  return value < 60 ? `${Number(value.toPrecision(3))} s` : clock(value);
}

export function clock(value) {
  const whole = Math.round(value), hours = Math.floor(whole / 3600);
  const [minutes, rest] = [Math.floor(whole / 60) % 60, whole % 60];
  const two = (part) => String(part).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

/** A bar as long as a share, with the figure beside it. */
export function meter(share, text, hue = "var(--accent)") {
  const width = `${100 * Math.min(1, Math.max(0, share ?? 0))}%`;
  const inside = make("span", { class: "meter-fill", style: { width, background: hue } });
  return make("span", { class: "meter", title: text }, inside);
}

export function badge(text, kind = "") {
  return make("span", { class: `badge ${kind}` }, text);
}

export function swatch(hue) {
  return make("span", { class: "key", style: { background: hue } });
}

/** A card with a heading. */
export function card(title, ...children) {
  return make("section", { class: "card" }, title ? make("h2", {}, title) : null, ...children);
}

export function table(head, rows, attributes = {}) {
  const cells = (kind, values) => values.map((value) => (value instanceof Node && value.tagName === kind
    ? value : make(kind, {}, value ?? "–")));
  return make("table", attributes,
    head ? make("thead", {}, make("tr", {}, ...cells("TH", head))) : null,
    make("tbody", {}, ...rows.map((row) => (row instanceof Node ? row : make("tr", {}, ...cells("TD", row))))));
}

export function fail(text) {
  const place = document.getElementById("error");
  place.textContent = text;
  place.hidden = !text;
}

// Okabe and Ito: told apart with any colour vision. On white, orange and sky blue are darker: all have 3:1.
export const DARK = matchMedia("(prefers-color-scheme: dark)").matches;
export const FULL = DARK ? 50 : 70; // % of a colour behind text, which still has 4.5:1
export const PALETTE = [
  ...["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c"],
].map((hue, at) => (DARK ? { 0: "#3d9be0" }[at] : { 1: "#bf8400", 4: "#3a96cf" }[at]) ?? hue);

/** The colour of a run, the same on every tab. */
export const hue = (run) => PALETTE[run % PALETTE.length];
