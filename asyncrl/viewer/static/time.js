// The tab of time: lanes on a canvas, of what each process did when. Spans are those of a LaneWindow of viewer/lanes.py; a
// window that is zoomed into is asked for again, with finer spans. Wheel or + and - zoom, dragging or the arrows move, a name in
// the legend is switched by a click.
import { PALETTE, fail, make } from "view/dom.js";
import { ask, isFile } from "view/source.js";

const ROW = 16, GAP = 2, HEAD = 20, LABELS = 210; // pixels
const PAUSE = 150; // milliseconds without a change before the spans of a window are asked for

/** The first and last second shown, after zooming by `factor` around second `at`, within 0 and `whole`. */
function zoomed([from, to], factor, at, whole) {
  const width = Math.min(Math.max((to - from) * factor, 1e-3), whole);
  return moved([at - (at - from) * (width / (to - from)), 0], 0, whole, width);
}

/** Moved by so many seconds, within 0 and `whole`. */
function moved([from, to], by, whole, width = to - from) {
  const start = Math.min(Math.max(from + by, 0), Math.max(whole - width, 0));
  return [start, start + width];
}

/** What is said of a span: name, duration, how many, details. */
function described([start, end, name, calls, seconds, text], names) {
  const length = end - start, lines = [names[name], `${length.toPrecision(3)} s`];
  if (calls > 1) lines.push(`${calls} calls, ${(seconds / Math.max(length, 1e-9)).toFixed(1)} at once on average`);
  return text ? [...lines, text] : lines;
}

/** A picture in `element`: `draw(data, shown)` shows the spans of a window, and with `shown` moves there.
 * Seconds are those since the run's start. `changed(shown, ended)` is called when another window is shown,
 * `ended` once nobody has moved it for a moment. */
function picture(element, changed) {
  const colours = new Map(), hidden = new Set(); // names keep their colour, whatever window they are in
  const canvas = make("canvas", { tabindex: 0, role: "img", "aria-label": "What each process did over time", style: { width: "100%", display: "block", touchAction: "pan-y" } });
  const legend = make("div", { class: "bar" }), tip = make("div", { class: "tip", hidden: "" });
  let lines = [], names = [], offset = 0, whole = 1e-3, shown = [0, 1e-3], dragged = null, timer = 0;
  element.replaceChildren(legend, canvas, tip);

  const width = () => Math.max(canvas.clientWidth - LABELS, 1);
  const x = (second) => LABELS + ((second - shown[0]) / (shown[1] - shown[0])) * width();
  const second = (event) => {
    const place = event.clientX - canvas.getBoundingClientRect().left - LABELS;
    return shown[0] + (place / width()) * (shown[1] - shown[0]);
  };
  const colour = (name) => PALETTE[colours.get(name) % PALETTE.length];

  function draw(data, window_) {
    whole = Math.max(data.end - data.start, 1e-3);
    offset = data.from - data.start;
    names = data.names;
    lines = data.processes.flatMap(({ title, rows }) => [{ title }, ...rows]);
    names.filter((name) => !colours.has(name)).forEach(add);
    if (window_) shown = window_;
    changed(shown, false);
    paint();
  }

  function add(name) {
    colours.set(name, colours.size);
    const press = (event) => {
      if (!hidden.delete(name)) hidden.add(name);
      event.currentTarget.setAttribute("aria-pressed", String(!hidden.has(name)));
      paint();
    };
    legend.append(make("button", { "aria-pressed": "true", onclick: press, style: { borderLeft: `10px solid ${colour(name)}` } }, name));
  }

  function paint() {
    const ratio = window.devicePixelRatio || 1, height = HEAD + lines.length * (ROW + GAP);
    canvas.style.height = `${height}px`;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = height * ratio;
    const context = canvas.getContext("2d"), ink = getComputedStyle(element).color;
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = ink;
    for (let part = 0; part < 6; part++) {
      const at = shown[0] + ((shown[1] - shown[0]) * part) / 6;
      context.fillText(`${at.toPrecision(4)} s`, x(at), HEAD / 2);
    }
    lines.forEach((line, number) => {
      const top = HEAD + number * (ROW + GAP);
      context.fillStyle = ink;
      context.fillText(line.title, line.spans ? 12 : 0, top + ROW / 2, LABELS - 16);
      for (const [start, end, name] of line.spans ?? []) {
        if (end + offset < shown[0] || start + offset > shown[1] || hidden.has(names[name])) continue;
        const left = Math.max(x(start + offset), LABELS), right = Math.min(x(end + offset), LABELS + width());
        context.fillStyle = colour(names[name]);
        context.fillRect(left, top, Math.max(right - left - 0.5, 1), ROW);
      }
    });
  }

  function show(next) {
    shown = next;
    changed(shown, false);
    paint();
    clearTimeout(timer);
    timer = setTimeout(() => changed(shown, true), PAUSE);
  }

  function hover(event) {
    const place = event.clientY - canvas.getBoundingClientRect().top - HEAD;
    const at = second(event) - offset, slack = (shown[1] - shown[0]) / width();
    const spans = lines[Math.floor(place / (ROW + GAP))]?.spans ?? [];
    const span = spans.findLast(([start, end, name]) => start - slack <= at && at <= end + slack && !hidden.has(names[name]));
    tip.hidden = !span;
    if (span) tip.textContent = described(span, names).join("\n");
    Object.assign(tip.style, { left: `${event.clientX + 12}px`, top: `${event.clientY + 12}px` });
  }

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    show(zoomed(shown, event.deltaY > 0 ? 1.25 : 0.8, second(event), whole));
  }, { passive: false });
  canvas.onpointerdown = (event) => { dragged = second(event); canvas.setPointerCapture(event.pointerId); };
  canvas.onpointerup = canvas.onpointercancel = () => { dragged = null; };
  canvas.onpointerleave = () => { tip.hidden = true; };
  canvas.onpointermove = (event) =>
    dragged === null ? hover(event) : show(moved(shown, dragged - second(event), whole));
  canvas.onkeydown = (event) => {
    const step = (shown[1] - shown[0]) / 5, middle = (shown[0] + shown[1]) / 2;
    const next = {
      "+": () => zoomed(shown, 0.8, middle, whole), "=": () => zoomed(shown, 0.8, middle, whole),
      "-": () => zoomed(shown, 1.25, middle, whole),
      ArrowLeft: () => moved(shown, -step, whole), ArrowRight: () => moved(shown, step, whole),
    }[event.key];
    if (next) { event.preventDefault(); show(next()); }
  };
  new ResizeObserver(paint).observe(element);
  return { draw, show: ([from, to]) => show(moved([from, to], 0, whole, Math.min(Math.max(to - from, 1e-3), whole))) };
}

let view = null;
let run = 0;
let asked = 0; // answers of earlier questions are not drawn

export async function show(place, route, state) {
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
