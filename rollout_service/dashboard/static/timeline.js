// The round timeline: what one sees and does. Where bars go is in timeline_layout.js, how they are painted in
// timeline_paint.js.

import { byId, colour, el, fill, onTheme, setText } from "./dom.js";
import { NOTHING, clock, count, duration, number, percent } from "./format.js";
import { layOut, readSample, sampleAt } from "./timeline_layout.js";
import { paintBars, pixelOf } from "./timeline_paint.js";

const HEAD = 20; // pixels for the names of rounds
const FOOT = 22; // pixels for the time axis
const NUM_VERSION_COLOURS = 10;
const FOLLOWED_ROUNDS = 6; // enough to see a sample go over a cut
const SHORTEST_S = 0.01;
const MAX_ROW = 22;
const PAN_STEP = 0.15; // of what is visible

const state = { picture: null, model: null, view: null, follow: true, chosen: -1, hovered: -1, href: null, colours: null, image: null, queued: false };

/** Draws the picture `timeline`. `href`: from a group's id to the address of its page, or null where there is none. */
export function drawTimeline(picture, href) {
  if (state.picture === null) listen();
  const chosen = state.model?.samples[state.chosen]?.[0];
  Object.assign(state, { picture, model: layOut(picture), href });
  state.chosen = chosen === undefined ? -1 : state.model.samples.findIndex((s) => s[0] === chosen);
  state.hovered = -1;
  byId("timeline-empty").hidden = state.model.samples.length > 0;
  if (state.model.samples.length) {
    if (state.follow || state.view === null) followNow();
    else state.view.row = Math.max(state.view.row, fitRow());
  }
  drawRoundsTable(picture);
  queue();
}

function followNow() {
  const { picture, model } = state;
  const rounds = picture.rounds.slice(-FOLLOWED_ROUNDS);
  const from = Math.max(model.from, rounds.length ? rounds[0].started_at : model.from);
  setView(Math.min(from, model.to), model.to);
}

function setView(from, to) {
  const { model } = state;
  const span = Math.min(Math.max(to - from, SHORTEST_S), Math.max(1.04 * (model.to - model.from), SHORTEST_S));
  const margin = 0.02 * span;
  const start = Math.min(Math.max(from, model.from - margin), Math.max(model.from - margin, model.to + margin - span));
  const row = state.view?.row ?? fitRow();
  state.view = { from: start, to: start + span, top: state.view?.top ?? 0, row: Math.max(row, fitRow()) };
  state.view.top = Math.max(0, Math.min(state.view.top, model.lanes - plotHeight() / state.view.row));
  queue();
}

const canvas = () => byId("timeline-canvas");
const plotHeight = () => Math.max(1, canvas().clientHeight - HEAD - FOOT);
const fitRow = () => Math.min(MAX_ROW / 2, plotHeight() / Math.max(1, state.model.lanes));
const timeAt = (x) => state.view.from + (x / canvas().clientWidth) * (state.view.to - state.view.from);
const xAt = (at) => ((at - state.view.from) / (state.view.to - state.view.from)) * canvas().clientWidth;

function queue() {
  if (state.queued) return;
  state.queued = true;
  requestAnimationFrame(() => {
    state.queued = false;
    render();
  });
}

function render() {
  if (!state.view || canvas().clientWidth === 0) return;
  const began = performance.now();
  const ratio = globalThis.devicePixelRatio || 1;
  const [width, height] = [Math.round(canvas().clientWidth * ratio), Math.round(canvas().clientHeight * ratio)];
  if (canvas().width !== width || canvas().height !== height) {
    canvas().width = width;
    canvas().height = height;
    state.image = null;
  }
  const context = canvas().getContext("2d", { alpha: false });
  const rows = Math.max(1, height - Math.round((HEAD + FOOT) * ratio));
  state.colours ??= readColours();
  if (state.image === null || state.image.data.height !== rows) {
    const data = new ImageData(width, rows);
    state.image = { data, pixels: new Uint32Array(data.data.buffer) };
  }
  paintBars(state.model, { ...state.view, row: state.view.row * ratio }, state.image.pixels, width, rows, state.colours.pixels);
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.fillStyle = state.colours.ground;
  context.fillRect(0, 0, width, height);
  context.putImageData(state.image.data, 0, Math.round(HEAD * ratio));
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  drawMarks(context);
  drawAxis(context);
  drawChosen(context);
  drawLegend();
  // For who asks what is seen: a test, or a person with the console.
  const { from, to, top, row } = state.view;
  canvas().dataset.view = JSON.stringify({ from, to, top, row, follow: state.follow, samples: state.model.samples.length });
  canvas().dataset.paintMs = (performance.now() - began).toFixed(2);
}

function readColours() {
  const versions = Array.from({ length: NUM_VERSION_COLOURS }, (_, i) => colour(`v${i}`));
  const [ground, parked, waiting] = ["sunk", "parked", "waiting"].map(colour);
  return {
    ground, versions, text: colour("text"), muted: colour("muted"), line: colour("line-strong"), cut: colour("cut"), install: colour("install"),
    pixels: { ground: pixelOf(ground), parked: pixelOf(parked), waiting: pixelOf(waiting), versions: Uint32Array.from(versions.map(pixelOf)) },
  };
}

function drawMarks(context) {
  const { picture, view, colours } = state;
  const bottom = canvas().clientHeight - FOOT;
  context.font = `11px ${colour("sans")}`;
  context.textBaseline = "middle";
  context.fillStyle = colours.install;
  for (const install of picture.installs) {
    if (install.end < view.from || install.start > view.to) continue;
    context.fillRect(xAt(install.start), HEAD, Math.max(1, xAt(install.end) - xAt(install.start)), bottom - HEAD);
  }
  let labelled = -Infinity;
  for (const round of picture.rounds) {
    const x = xAt(round.started_at);
    if (x > canvas().clientWidth) break;
    const end = xAt(round.offered_at ?? picture.now);
    if (end < 0) continue;
    line(context, x, 4, HEAD, colours.line, []);
    const at = Math.max(x, 0) + 5;
    if (at > labelled + 8 && end - at > 14) {
      context.fillStyle = colours.muted;
      const text = end - at > 64 ? `round ${round.round}` : String(round.round);
      context.fillText(text, at, HEAD / 2);
      labelled = at + context.measureText(text).width;
    }
    if (round.cut_at !== null && round.cut_at >= view.from) line(context, xAt(round.cut_at), HEAD, bottom, colours.cut, [4, 3]);
  }
  drawTrained(context, bottom);
}

function drawTrained(context, bottom) {
  const { picture, view, colours } = state;
  context.fillStyle = colours.text;
  for (const [, at] of picture.trained) {
    if (at < view.from || at > view.to) continue;
    const x = xAt(at);
    context.beginPath();
    context.moveTo(x, bottom - 1);
    context.lineTo(x - 4, bottom + 5);
    context.lineTo(x + 4, bottom + 5);
    context.fill();
  }
}

function line(context, x, y0, y1, stroke, dash) {
  context.strokeStyle = stroke;
  context.lineWidth = 1;
  context.setLineDash(dash);
  context.beginPath();
  context.moveTo(Math.round(x) + 0.5, y0);
  context.lineTo(Math.round(x) + 0.5, y1);
  context.stroke();
  context.setLineDash([]);
}

const STEPS_S = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400];

function drawAxis(context) {
  const { view, colours } = state;
  const width = canvas().clientWidth;
  const y = canvas().clientHeight - FOOT;
  const step = STEPS_S.find((s) => (s / (view.to - view.from)) * width >= 84) ?? 86400;
  line(context, 0, y, y, colours.line, []);
  context.fillStyle = colours.muted;
  for (let at = Math.ceil(view.from / step) * step; at < view.to; at += step) {
    const x = xAt(at);
    line(context, x, y, y + 4, colours.line, []);
    const text = step < 1 ? `${clock(at)}${(at % 1).toFixed(2).slice(1)}` : clock(at);
    if (x + 4 + context.measureText(text).width < width) context.fillText(text, x + 4, y + FOOT / 2 + 1);
  }
}

function drawChosen(context) {
  const owner = state.hovered >= 0 ? state.hovered : state.chosen;
  if (owner < 0) return;
  const { view, model, colours } = state;
  const attempts = model.samples[owner][5];
  const y = HEAD + (model.laneOf[owner] - view.top) * view.row;
  if (y < HEAD - view.row || y > canvas().clientHeight - FOOT) return;
  const x = xAt(attempts[0][2]);
  context.strokeStyle = colours.text;
  context.lineWidth = 1.5;
  context.strokeRect(x - 1, y - 1.5, Math.max(3, xAt(attempts[attempts.length - 1][3]) - x + 2), Math.max(3, view.row + 1));
}

function drawLegend() {
  const { view, picture, model, colours } = state;
  const seen = new Set();
  for (const round of picture.rounds) if ((round.offered_at ?? picture.now) >= view.from && round.started_at <= view.to) seen.add(round.active_version);
  const versions = [...seen].sort((a, b) => a - b).slice(-NUM_VERSION_COLOURS);
  const key = versions.join() + colours.ground + picture.num_left_out;
  if (state.legend === key) return;
  state.legend = key;
  const mark = (fillColour, text, kind = "") => {
    const swatch = el("i", { class: `swatch ${kind}` });
    swatch.style.background = fillColour;
    return el("span", {}, swatch, text);
  };
  byId("timeline-legend").replaceChildren(
    ...versions.map((v) => mark(colours.versions[v % NUM_VERSION_COLOURS], `version ${v}`)),
    mark(colour("parked"), "parked", "line"), mark(colour("waiting"), "before its first token"), mark(colours.cut, "cut", "line"), mark(colours.install, "install"),
    el("span", {}, "▲ step trained"),
    el("span", {}, `${count(model.samples.length)} samples${picture.num_left_out ? `, ${count(picture.num_left_out)} older ones left out` : ""}`),
  );
}

/** The sentences about one sample, for the tip and for a screen reader. */
function describe(owner) {
  const sample = readSample(state.model.samples[owner]);
  const last = sample.attempts[sample.attempts.length - 1];
  const tokens = last.before + last.segments.reduce((sum, s) => sum + s.tokens, 0);
  const how = { stop: "ended by itself", length: "cut at the full length", parked: "parked", lost: "lost with its engine, to be continued", running: "running" }[last.how];
  return {
    title: sample.sample,
    lines: [
      `prompt ${sample.prompt}, ${count(tokens)} tokens, ${sample.failed ? `failed: ${sample.failed}` : how}${sample.reward === null ? "" : `, reward ${number(sample.reward)}`}`,
      ...sample.attempts.map((a) => {
        const spans = a.segments.map((s) => `v${s.version} × ${s.tokens}`).join(" → ") || "no token";
        return `round ${a.round}: ${spans} in ${duration(a.end - a.start)}${a.waited === null ? "" : `, after waiting ${duration(a.waited)}`}`;
      }),
    ],
    group: sample.group,
  };
}

function showTip(owner, x, y) {
  const tip = byId("timeline-tip");
  tip.hidden = owner < 0;
  if (owner < 0) return;
  const { title, lines } = describe(owner);
  tip.replaceChildren(el("strong", {}, title), el("ul", {}, ...lines.map((text) => el("li", {}, text))));
  const box = canvas().getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, box.width - tip.offsetWidth - 4))}px`;
  tip.style.top = `${y + 18 + tip.offsetHeight > box.height ? Math.max(4, y - tip.offsetHeight - 10) : y + 18}px`;
}

function choose(owner) {
  const { model, view } = state;
  if (!model?.samples.length) return;
  state.chosen = Math.max(0, Math.min(owner, model.samples.length - 1));
  const at = model.samples[state.chosen][5][0][2];
  if (at < view.from || at > view.to) {
    setFollow(false);
    setView(at - 0.3 * (view.to - view.from), at + 0.7 * (view.to - view.from));
  }
  const { title, lines } = describe(state.chosen);
  setText(byId("timeline-readout"), `${title}: ${lines.join("; ")}.${state.href ? " Enter opens its group." : ""}`);
  queue();
}

function open(owner) {
  if (owner >= 0 && state.href) globalThis.location.href = state.href(state.model.samples[owner][1]);
}

function zoom(factor, centre = (state.view.from + state.view.to) / 2) {
  const { from, to } = state.view;
  setFollow(false);
  setView(centre - (centre - from) * factor, centre + (to - centre) * factor);
}

function pan(share) {
  const { from, to } = state.view;
  setFollow(false);
  setView(from + share * (to - from), to + share * (to - from));
}

function setFollow(follow) {
  state.follow = follow;
  document.querySelector('[data-timeline="follow"]').setAttribute("aria-pressed", String(follow));
  if (follow && state.model?.samples.length) followNow();
}

const ACTIONS = {
  earlier: () => pan(-PAN_STEP), later: () => pan(PAN_STEP), in: () => zoom(0.7), out: () => zoom(1 / 0.7), follow: () => setFollow(!state.follow),
  all: () => { setFollow(false); state.view.row = fitRow(); setView(state.model.from, state.model.to); },
};
const KEYS = { ArrowLeft: ACTIONS.earlier, ArrowRight: ACTIONS.later, "+": ACTIONS.in, "=": ACTIONS.in, "-": ACTIONS.out, 0: ACTIONS.all, f: ACTIONS.follow,
  ArrowDown: () => choose(state.chosen < 0 ? firstVisible() : state.chosen + 1), ArrowUp: () => choose(state.chosen - 1), Enter: () => open(state.chosen) };

const firstVisible = () => Math.max(0, state.model.samples.findIndex((s) => s[5][0][2] >= state.view.from));

function listen() {
  const target = canvas();
  for (const button of document.querySelectorAll("[data-timeline]")) {
    button.addEventListener("click", () => { if (state.view) ACTIONS[button.dataset.timeline](); });
  }
  target.addEventListener("keydown", (event) => {
    if (!state.view || event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(KEYS, event.key)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  target.addEventListener("wheel", onWheel, { passive: false });
  listenToPointer(target);
  new ResizeObserver(() => { if (state.view) { state.view.row = Math.max(state.view.row, fitRow()); queue(); } }).observe(target);
  onTheme(() => { state.colours = null; queue(); });
}

function onWheel(event) {
  if (!state.view) return;
  const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
  // A page that is scrolled past must not stop here: only a focused timeline zooms, or a held Ctrl.
  if (!sideways && !event.ctrlKey && !event.metaKey && document.activeElement !== canvas()) return;
  event.preventDefault();
  if (sideways || event.shiftKey) pan((event.deltaX || event.deltaY) / canvas().clientWidth);
  else if (event.altKey) heighten(event.deltaY < 0 ? 1.2 : 1 / 1.2);
  else zoom(1.0018 ** Math.max(-300, Math.min(300, event.deltaY)), timeAt(event.offsetX));
}

function heighten(factor) {
  state.view.row = Math.min(MAX_ROW, Math.max(fitRow(), state.view.row * factor));
  setView(state.view.from, state.view.to);
}

function hover(event) {
  const lane = Math.floor(state.view.top + (event.offsetY - HEAD) / state.view.row);
  const slack = (3 / canvas().clientWidth) * (state.view.to - state.view.from);
  const owner = event.offsetY < HEAD ? -1 : sampleAt(state.model, lane, timeAt(event.offsetX), slack);
  if (owner !== state.hovered) queue();
  state.hovered = owner;
  showTip(owner, event.offsetX, event.offsetY);
}

function listenToPointer(target) {
  let held = null;
  target.addEventListener("pointerdown", (event) => {
    if (!state.view || event.button !== 0) return;
    hover(event); // a finger doesn't hover before it taps
    held = { x: event.offsetX, y: event.offsetY, ...state.view, moved: false };
    target.setPointerCapture(event.pointerId);
  });
  target.addEventListener("pointermove", (event) => {
    if (!state.view) return;
    if (held && (held.moved || Math.hypot(event.offsetX - held.x, event.offsetY - held.y) > 4)) {
      held.moved = true;
      target.classList.add("dragging");
      setFollow(false);
      const shift = ((held.x - event.offsetX) / target.clientWidth) * (held.to - held.from);
      state.view.top = held.top + (held.y - event.offsetY) / state.view.row;
      setView(held.from + shift, held.to + shift);
      return showTip(-1);
    }
    hover(event);
  });
  target.addEventListener("pointerup", () => {
    if (held && !held.moved && state.hovered >= 0) {
      choose(state.hovered);
      open(state.hovered);
    }
    held = null;
    target.classList.remove("dragging");
  });
  target.addEventListener("pointerleave", () => { state.hovered = -1; showTip(-1); queue(); });
}

function drawRoundsTable(picture) {
  const columns = ["Round", "Began", "Duration", "Version", "Groups ready", "New", "Surplus", "Parked", "Idle slots", "After 90 %"].map((label, i) => ({ label, numeric: i > 1 }));
  fill(byId("rounds-table"), columns, picture.rounds.slice(-100).reverse().map((r) => [
    String(r.round), clock(r.started_at), r.offered_at === null ? "runs" : duration(r.offered_at - r.started_at), String(r.active_version), count(r.ready_s.length),
    count(r.num_fresh), count(r.surplus_groups), count(r.parked_samples), percent(r.bubble_share), r.tail_s === null ? NOTHING : duration(r.tail_s),
  ]), "No round has run yet.");
}
