// Line charts of several runs, and bars, by uPlot.
import { PALETTE, make, number } from "view/dom.js";

const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];
const HEIGHT = 190;
const figures = new Map(); // by title: a chart stays while its lines do, and with it what was zoomed into

// `tables`: of each run {x, columns}; `names`: metrics of a chart, each with a label. Returns null where no run
// has any of them.
export function lines(title, names, tables, runs, scale) {
  const data = [];
  const series = [{ label: scale.label, value: (_, v) => number(v, 5) }];
  const bands = [];
  tables.forEach((table, run) => {
    const own = Object.entries(names).filter(([name]) => table.columns[name]?.some((v) => v !== null));
    own.forEach(([name, label], at) => {
      const stroke = tables.length > 1 ? PALETTE[run % PALETTE.length] : PALETTE[at % PALETTE.length];
      const dash = tables.length > 1 ? DASHES[at % DASHES.length] : [];
      const add = (column, more) => {
        const found = points(table.x, table.columns[column]);
        data.push(found);
        series.push({ stroke, dash, spanGaps: true, value: (_, v) => number(v), points: { show: found[0].length < 40, size: 4 }, ...more });
      };
      add(name, { label: tables.length > 1 ? `${runs[run]} ${label}` : label });
      if (table.columns[`${name}/low`]) {
        const faint = { width: 0, points: { show: false } };
        add(`${name}/high`, { ...faint, label: "95% high" });
        add(`${name}/low`, { ...faint, label: "95% low" });
        bands.push({ series: [series.length - 2, series.length - 1], fill: `${stroke}33` });
      }
    });
  });
  return data.length ? figure(title, { series, bands, scales: { x: { time: false } } }, uPlot.join(data)) : null;
}

// `counts`: by whole number.
export function bars(title, label, counts) {
  const keys = Object.keys(counts).map(Number).sort((a, b) => a - b);
  if (!keys.length) return null;
  const series = [
    { label },
    { label: "tokens", stroke: PALETTE[0], fill: `${PALETTE[0]}88`, paths: uPlot.paths.bars({ size: [0.8] }), points: { show: false } },
  ];
  const options = {
    series,
    scales: { x: { time: false, range: [keys[0] - 0.6, keys.at(-1) + 0.6] }, y: { range: (_, low, high) => [0, high] } },
    axes: [{ incrs: [1, 2, 5, 10, 20, 50, 100] }, { size: 70 }],
  };
  return figure(title, options, [keys, keys.map((key) => counts[key])]);
}

function points(x, values) {
  const known = x.map((at, i) => [at, values[i]]).filter(([, value]) => value !== null);
  known.sort((a, b) => a[0] - b[0]);
  const single = known.filter(([at], i) => i === known.length - 1 || known[i + 1][0] !== at); // uPlot joins on x
  return [single.map(([at]) => at), single.map(([, value]) => value)];
}

function figure(title, options, data) {
  const kind = JSON.stringify(options); // without its functions
  const old = figures.get(title);
  if (old?.kind === kind) {
    old.update(data);
    return old.element;
  }
  old?.chart()?.destroy();
  const place = make("div");
  const element = make("figure", {}, make("figcaption", {}, title), place);
  const style = getComputedStyle(document.documentElement);
  const axis = { stroke: style.getPropertyValue("--dim"), grid: { stroke: style.getPropertyValue("--line"), width: 0.5 } };
  let chart = null;
  const fit = () => {
    const width = place.clientWidth;
    if (width < 50) return; // its tab is hidden
    if (chart) return void chart.setSize({ width, height: HEIGHT });
    const axes = [0, 1].map((at) => ({ ...axis, size: at ? 60 : 30, ...(options.axes?.[at] ?? {}) }));
    chart = new uPlot({ width, height: HEIGHT, cursor: { sync: { key: "x" } }, ...options, axes }, data, place);
  };
  const update = (next) => {
    const { min, max } = chart?.scales.x ?? {};
    const all = !(min > data[0][0] || max < data[0].at(-1));
    data = next;
    chart?.setData(data, all);
    if (!all) chart.redraw();
  };
  new ResizeObserver(() => requestAnimationFrame(fit)).observe(place);
  figures.set(title, { kind, element, update, chart: () => chart });
  return element;
}
