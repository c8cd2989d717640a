// Charts by uPlot, each with its numbers as a table. A chart is drawn when it is on the screen, and again when its data,
// its width or the theme changes. Where the pointer is elsewhere, a legend has the newest values.

import { colour, el, fill, onTheme } from "./dom.js";
import { NOTHING, number } from "./format.js";

const HEIGHT = 208;
const MAX_TABLE_ROWS = 200; // of the newest: a table is for reading
const CHARACTER = 6.6; // pixels of one of an axis' labels, nearly
const MANY_DECADES = 2.5; // labels at 1, 2 and 5 below, at powers of ten alone above
const shown = new Map(); // id → {spec, plot, drawn, visible}

/**
 * Draws `spec` into the figure `id`: {x, xLabel, series: [{label, values, colour?, alpha?, dash?, points?, axis?, bars?,
 * step?, width?}], y: {format, log?, min?, max?, atLeast?, incrs?, label?}, y2?, logX?, time?, wholeX?, stacked?, curve?,
 * bands?: [[upper, lower]], empty?}. All values follow `x`; a series without one is left out. `atLeast`: a range of y that
 * is always shown, so that noise isn't drawn as if it were news. `curve`: x is not an order, so there's no newest value.
 */
export function chart(id, spec) {
  const figure = document.getElementById(id);
  if (!figure) return;
  let state = shown.get(id);
  if (!state) {
    state = { figure, box: figure.querySelector(".plot"), details: figure.querySelector(".numbers"), plot: null, visible: false };
    shown.set(id, state);
    state.details.addEventListener("toggle", () => fillTable(state));
    appears.observe(figure);
    widths.observe(state.box);
  }
  state.spec = { ...spec, series: spec.series.filter((s) => s.values.some(isKnown)) };
  if (state.visible) draw(state);
  fillTable(state);
}

const isKnown = (v) => v !== null && v !== undefined;

function draw(state) {
  const { spec, box } = state;
  if (!spec) return;
  state.details.hidden = !spec.series.length;
  if (!spec.x.length || !spec.series.length) {
    state.plot?.destroy();
    state.plot = null;
    box.replaceChildren(el("p", { class: "empty" }, spec.empty ?? "Nothing to draw yet."));
    return;
  }
  const data = [spec.x, ...(spec.stacked ? stack(spec.series) : spec.series.map((s) => s.values))];
  const shape = JSON.stringify([spec.series.map((s) => [s.label, s.axis, s.bars, s.colour, s.dash, s.alpha]), spec.logX, spec.y, spec.y2, spec.bands, spec.stacked]);
  if (state.plot && state.shape === shape) {
    const { min, max } = state.plot.scales.x;
    state.plot.setData(data, !state.zoomed);
    if (state.zoomed) state.plot.setScale("x", { min, max }); // what was selected stays, and y follows what is in it
    return;
  }
  state.plot?.destroy();
  box.replaceChildren();
  box.classList.toggle("curve", Boolean(spec.curve));
  Object.assign(state, { shape, zoomed: false });
  state.plot = new globalThis.uPlot(options(state, box.clientWidth), data, box);
}

/** Each series on top of those after it, so that what is drawn in order leaves each its own stripe. */
function stack(series) {
  const sums = [];
  series.reduceRight((below, s) => {
    const sum = s.values.map((v, i) => (v ?? 0) + (below?.[i] ?? 0));
    sums.unshift(sum);
    return sum;
  }, null);
  return sums;
}

function options(state, width) {
  const { spec } = state;
  const colours = spec.series.map((s) => `${colour(s.colour ?? "c0")}${s.alpha ?? ""}`);
  const grid = { stroke: colour("grid"), width: 1 };
  const font = `11px ${colour("sans")}`;
  const axis = { stroke: colour("muted"), grid, ticks: { show: false }, font, labelFont: font, gap: 6 };
  const yAxis = (y, scale, side) => ({
    ...axis, scale, side, size: (u, texts) => 12 + CHARACTER * Math.max(3, ...(texts ?? []).map((text) => text?.length ?? 0)),
    grid: side === 1 ? { show: false } : grid, label: y.label, labelSize: 16, labelGap: 2, incrs: y.incrs, ...(y.log ? logTicks : {}),
    values: (_, splits) => splits.map((v) => y.format(v)),
  });
  const scale = (y) => ({ distr: y.log ? 3 : 1, range: bounds(y), auto: true });
  return {
    width: Math.max(160, width),
    height: HEIGHT,
    padding: [10, spec.y2 ? 0 : 14, 0, 0],
    hooks: {
      setSelect: [(u) => { if (u.select.width > 0) state.zoomed = true; }],
      ready: [(u) => u.over.addEventListener("dblclick", () => { state.zoomed = false; })],
    },
    legend: { live: true, markers: { width: 0, fill: (u, i) => (i ? colours[i - 1] : "transparent") } },
    cursor: { drag: { x: true, y: false, setScale: true }, points: { size: 6 } },
    scales: { x: { time: Boolean(spec.time), distr: spec.logX ? 3 : 1, range: xRange(spec) }, y: scale(spec.y), ...(spec.y2 ? { y2: scale(spec.y2) } : {}) },
    axes: [
      { ...axis, size: 24, label: spec.xLabel, labelSize: 16, labelGap: 0, ...xTicks(spec, grid) },
      yAxis(spec.y, "y", 3),
      ...(spec.y2 ? [yAxis(spec.y2, "y2", 1)] : []),
    ],
    series: [{ label: spec.xName ?? spec.xLabel, value: (_, v) => xText(state.spec, v) }, ...spec.series.map((s, i) => series(s, colours[i], state))],
    bands: (spec.bands ?? []).map(([upper, lower]) => ({ series: [upper, lower], fill: colour("band") })),
  };
}

const bounds = (y) => (u, low, high) => {
  if (y.log) return globalThis.uPlot.rangeLog(low ?? 0.01, high ?? 1, 10, false);
  const [least, most] = y.atLeast ?? [Infinity, -Infinity];
  const [bottom, top] = [Math.min(low ?? 0, least), Math.max(high ?? 1, most)];
  const span = top - bottom || Math.abs(top) || 1;
  const from = y.min ?? bottom - 0.05 * span;
  const to = y.max ?? top + 0.08 * span;
  return [from, to > from ? to : from + 1];
};

function xRange(spec) {
  if (spec.logX) return (u, low, high) => [low, high > low ? high : low * 10];
  if (spec.series.some((s) => s.bars)) return (u, low, high) => [low - 0.6, high + 0.6];
  return (u, low, high) => (high > low ? [low, high] : [low - 0.5, high + 0.5]);
}

function xTicks(spec, grid) {
  if (spec.time) return { values: (u, splits) => splits.map((v) => new Date(1000 * v).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: splits[1] - splits[0] < 60 ? "2-digit" : undefined })), space: 76 };
  if (spec.xTexts) return { values: (u, splits) => splits.map((v) => spec.xTexts[v] ?? ""), incrs: [1], space: 24, grid: { show: false } };
  const values = (u, splits) => splits.map((v) => (spec.xFormat ?? number)(v));
  if (spec.logX) return { values, ...logTicks };
  return { values, grid: spec.series.some((s) => s.bars) ? { show: false } : grid, ...(spec.wholeX ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 10000, 100000] } : {}) };
}

/** Ticks at powers of ten, over few decades at twice and five times them, too: uPlot's own begin where the data does. */
const logTicks = {
  filter: (u, splits) => splits,
  splits: (u, axis, low, high) => {
    const factors = Math.log10(high / low) > MANY_DECADES ? [1] : [1, 2, 5];
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) for (const factor of factors) ticks.push(Number((factor * 10 ** power).toPrecision(3)));
    return ticks.filter((v) => v >= low * (1 - 1e-9) && v <= high * (1 + 1e-9));
  },
};

function xText(spec, v) {
  const x = v ?? (spec.curve ? null : spec.x[spec.x.length - 1]);
  return x === null ? NOTHING : spec.xTexts?.[x] ?? (spec.xFormat ?? number)(x);
}

function series(s, stroke, state) {
  const { spec } = state;
  const paths = s.bars ? globalThis.uPlot.paths.bars({ size: [0.72, 44], align: 0 }) : s.step ? globalThis.uPlot.paths.stepped({ align: 1 }) : undefined;
  return {
    label: s.label, stroke, paths, scale: s.axis ?? "y", width: s.bars ? 0 : s.width ?? 1.6, dash: s.dash, fill: s.bars || spec.stacked ? stroke : s.area ? `${stroke}22` : undefined,
    points: { show: s.points ?? (!s.bars && spec.x.length <= 2), size: 5, fill: stroke }, spanGaps: true,
    value: (_, v, index, at) => {
      const { series: now, curve, y, y2 } = state.spec; // setData keeps the plot and changes what it shows
      const { values, axis } = now[index - 1] ?? s;
      const value = at === null || at === undefined ? (curve ? null : values[values.length - 1]) : values[at];
      return isKnown(value) ? (axis === "y2" ? y2 : y).format(value) : NOTHING;
    },
  };
}

function fillTable(state) {
  if (!state.details.open || !state.spec) return;
  const { spec } = state;
  const columns = [{ label: spec.xName ?? spec.xLabel, numeric: true }, ...spec.series.map((s) => ({ label: s.label, numeric: true }))];
  const first = Math.max(0, spec.x.length - MAX_TABLE_ROWS);
  const rows = spec.x.slice(first).map((x, i) => [xText(spec, x), ...spec.series.map((s) => {
    const value = s.values[first + i];
    return isKnown(value) ? (s.axis === "y2" ? spec.y2 : spec.y).format(value) : NOTHING;
  })]);
  fill(state.details.querySelector(".scroll"), columns, spec.curve ? rows : rows.reverse(), spec.empty ?? "Nothing yet.");
}

const appears = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const state = shown.get(entry.target.id);
    if (!state) continue;
    state.visible = entry.isIntersecting;
    if (entry.isIntersecting) draw(state);
  }
}, { rootMargin: "300px" });

const widths = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const state = shown.get(entry.target.parentElement?.id);
    if (state?.plot && entry.contentRect.width > 0 && state.plot.width !== entry.contentRect.width) {
      state.plot.setSize({ width: entry.contentRect.width, height: HEIGHT });
    }
  }
});

onTheme(() => {
  for (const state of shown.values()) {
    state.shape = null;
    if (state.visible) draw(state);
  }
});

/** Step curves [[x, value…]] on the union of their x: {x, values: one array for each curve's column `1`}. */
export function alignCurves(curves) {
  const x = [...new Set(curves.flatMap((curve) => curve.map(([at]) => at)))].sort((a, b) => a - b);
  const values = curves.map((curve) => {
    let next = 0;
    return x.map((at) => {
      while (next < curve.length && curve[next][0] <= at) next += 1;
      return next === 0 || at > curve[curve.length - 1][0] ? null : curve[next - 1][1];
    });
  });
  return { x, values };
}
