// Lanes over time on a canvas: who did what when. `data` is a LaneWindow of asyncrl/viewer/lanes.py.
// Wheel or + and - zoom, dragging or the arrows move, a name in the legend is switched by a click.

const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a900", "#8a8a8a"]; // Okabe and Ito
const ROW = 16, GAP = 2, HEAD = 20, LABELS = 210; // pixels

/** The first and last second shown, after zooming by `factor` around second `at`, within 0 and `whole`. */
export function zoomed([from, to], factor, at, whole) {
  const width = Math.min(Math.max((to - from) * factor, 1e-3), whole);
  return moved([at - (at - from) * (width / (to - from)), 0], 0, whole, width);
}

/** Moved by so many seconds, within 0 and `whole`. */
export function moved([from, to], by, whole, width = to - from) {
  const start = Math.min(Math.max(from + by, 0), Math.max(whole - width, 0));
  return [start, start + width];
}

/** What is said of a span: name, duration, how many, details. */
export function described([start, end, name, calls, seconds, text], names) {
  const length = end - start, lines = [names[name], `${length.toPrecision(3)} s`];
  if (calls > 1) lines.push(`${calls} calls, ${(seconds / Math.max(length, 1e-9)).toFixed(1)} at once on average`);
  return text ? [...lines, text] : lines;
}

/** Draw `data` into `element`, which is emptied. */
export function draw(element, data) {
  const whole = Math.max(data.to - data.from, 1e-3), hidden = new Set();
  const lines = data.processes.flatMap(({ title, rows }) => [{ title }, ...rows]);
  const canvas = document.createElement("canvas"), legend = document.createElement("div");
  const tip = document.createElement("div");
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", "What each process did over time");
  canvas.style.cssText = "width:100%;display:block;touch-action:pan-y";
  tip.style.cssText = "position:fixed;pointer-events:none;white-space:pre;padding:4px 8px;display:none;" +
    "background:Canvas;color:CanvasText;border:1px solid GrayText;z-index:9";
  element.replaceChildren(legend, canvas, tip);
  let shown = [0, whole], dragged = null;

  data.names.forEach((name, number) => {
    const button = document.createElement("button");
    button.textContent = name;
    button.setAttribute("aria-pressed", "true");
    button.style.borderLeft = `10px solid ${COLOURS[number % COLOURS.length]}`;
    button.onclick = () => {
      if (!hidden.delete(number)) hidden.add(number);
      button.setAttribute("aria-pressed", String(!hidden.has(number)));
      button.style.opacity = hidden.has(number) ? 0.4 : 1;
      paint();
    };
    legend.append(button);
  });

  const width = () => Math.max(canvas.clientWidth - LABELS, 1);
  const x = (second) => LABELS + ((second - shown[0]) / (shown[1] - shown[0])) * width();
  const second = (event) => {
    const place = event.clientX - canvas.getBoundingClientRect().left - LABELS;
    return shown[0] + (place / width()) * (shown[1] - shown[0]);
  };

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
      context.globalAlpha = 1;
      context.fillStyle = ink;
      context.fillText(line.title, line.spans ? 12 : 0, top + ROW / 2, LABELS - 16);
      for (const [start, end, name] of line.spans ?? []) {
        if (end < shown[0] || start > shown[1] || hidden.has(name)) continue;
        const left = Math.max(x(start), LABELS), right = Math.min(x(end), LABELS + width());
        context.fillStyle = COLOURS[name % COLOURS.length];
        context.fillRect(left, top, Math.max(right - left - 0.5, 1), ROW);
      }
    });
  }

  function show(next) { shown = next; paint(); }

  function hover(event) {
    const place = event.clientY - canvas.getBoundingClientRect().top - HEAD;
    const at = second(event), slack = (shown[1] - shown[0]) / width();
    const spans = lines[Math.floor(place / (ROW + GAP))]?.spans ?? [];
    const span = spans.findLast(([start, end, name]) =>
      start - slack <= at && at <= end + slack && !hidden.has(name));
    tip.style.display = span ? "block" : "none";
    if (span) tip.textContent = described(span, data.names).join("\n");
    tip.style.left = `${event.clientX + 12}px`;
    tip.style.top = `${event.clientY + 12}px`;
  }

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    show(zoomed(shown, event.deltaY > 0 ? 1.25 : 0.8, second(event), whole));
  }, { passive: false });
  canvas.onpointerdown = (event) => { dragged = second(event); canvas.setPointerCapture(event.pointerId); };
  canvas.onpointerup = canvas.onpointercancel = () => { dragged = null; };
  canvas.onpointerleave = () => { tip.style.display = "none"; };
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
  paint();
}
