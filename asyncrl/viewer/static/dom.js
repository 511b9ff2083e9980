// Elements are made here, from text: nothing of a run is ever read as HTML.

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(digits)));
}

export function clock(seconds) {
  const whole = Math.round(seconds);
  const two = (part) => String(part).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

export function fail(text) {
  const place = document.getElementById("error");
  place.textContent = text;
  place.hidden = !text;
}

export function fold(title, open, ...children) {
  return make("details", open ? { open: "" } : {}, make("summary", {}, title), ...children);
}

// Okabe and Ito: told apart with any colour vision. On white, orange and sky blue are darker: all have 3:1 at least.
const DARK = matchMedia("(prefers-color-scheme: dark)").matches;
export const FULL = DARK ? 50 : 70; // % of a colour behind text, which still has 4.5:1
export const PALETTE = ["#0072b2", DARK ? "#e69f00" : "#bf8400", "#009e73", "#cc79a7", DARK ? "#56b4e9" : "#3a96cf", "#d55e00", "#8c8c8c"];
