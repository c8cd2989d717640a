// The ratio: what is in force, what is recommended, what others would do, and changing it.

import { chart } from "./charts.js";
import { byId, el, fill, fillStats, setText } from "./dom.js";
import { NOTHING, moment, number, percent } from "./format.js";

const ratioState = { picture: null, settings: null, touched: false };
const same = (a, b) => Math.abs(a - b) < 1e-9;
const text = (ratio) => String(Number(ratio.toFixed(3)));

const asSentence = (note) => (note ? `${note[0].toUpperCase()}${note.slice(1)}${note.endsWith(".") ? "" : "."}` : "");

/** Draws the picture `ratio`. */
export function drawRatio(picture) {
  ratioState.picture = picture;
  drawFacts();
  setText(byId("ratio-reason"), picture.reason ?? "");
  const note = asSentence(picture.note ?? "");
  setText(byId("ratio-note"), picture.predicted.length ? note : "");
  const predicted = [...picture.predicted].sort((a, b) => a.ratio - b.ratio);
  const column = (name) => predicted.map((p) => p[name]);
  chart("predicted", {
    x: column("ratio"), xLabel: "ratio", curve: true, y: { format: (v) => `${number(v)} ×`, label: "speed-up", atLeast: [0.9, 1.1] }, y2: { format: percent, min: 0, max: 1, label: "share" },
    empty: note || "There is no prediction yet.",
    series: [
      { label: "speed-up", values: column("speed_up"), points: true, width: 2.2 },
      { label: "off-policy tokens", values: column("off_policy_share"), points: true, axis: "y2", colour: "c1" },
      { label: "idle slots", values: column("bubble_share"), points: true, axis: "y2", colour: "c4" },
    ],
  });
  drawSlider();
}

/** Draws what `/v1/settings` says: the audit list, and where the slider may go. */
export function drawSettings(settings) {
  ratioState.settings = settings;
  const columns = [{ label: "When" }, { label: "What" }, { label: "From", numeric: true }, { label: "To", numeric: true }, { label: "By" }];
  const rows = [...settings.audit].reverse().flatMap((change) =>
    Object.entries(change.changes).map(([name, [from, to]]) => [moment(change.at), name, String(from), String(to), change.by]));
  fill(byId("audit"), columns, rows, "Nothing was changed yet.");
  drawFacts();
  drawSlider();
}

function drawFacts() {
  const { picture, settings } = ratioState;
  const of = { ...picture, ...settings };
  fillStats(byId("ratio-facts"), [
    ["in force", of.ratio === undefined ? NOTHING : text(of.ratio)],
    ["recommended", typeof of.recommended === "number" ? text(of.recommended) : NOTHING],
    ["lookahead", String(of.lookahead ?? NOTHING)],
    ["max_lag", String(of.max_lag ?? NOTHING)],
    ...(settings ? [["autotune", settings.autotune]] : []),
  ]);
}

function drawSlider() {
  const { settings, picture } = ratioState;
  const form = byId("ratio-form");
  if (!form || !settings) return;
  form.hidden = false;
  const input = byId("ratio-input");
  // The largest that max_lag allows: ceil(ratio) - 1 + lookahead <= max_lag.
  input.max = String(Math.max(1, settings.max_lag + 1 - settings.lookahead, Math.ceil(settings.ratio)));
  if (!ratioState.touched) input.value = String(settings.ratio);
  const take = byId("ratio-take");
  const recommended = picture?.recommended;
  take.hidden = typeof recommended !== "number" || same(recommended, settings.ratio);
  if (!take.hidden) setText(take, `Take the recommended ${text(recommended)}`);
  showSlider();
}

function showSlider() {
  const wanted = Number(byId("ratio-input").value);
  const changed = ratioState.touched && !same(wanted, ratioState.settings.ratio);
  const apply = byId("ratio-apply");
  setText(byId("ratio-output"), text(wanted));
  setText(apply, changed ? `Set the ratio to ${text(wanted)}` : "In force");
  apply.disabled = !changed;
}

/** Lets the slider change the ratio; `patch` sends settings and resolves to what is then in force. */
export function listenToRatio(patch) {
  const send = async (ratio) => {
    try {
      const settings = await patch({ ratio });
      ratioState.touched = false;
      drawSettings(settings);
      const warns = settings.autotune === "on" ? " Autotune is on and may change it again." : "";
      say(`The ratio is ${text(settings.ratio)} from the next decision on.${warns}`);
    } catch (error) {
      say(`Not changed: ${error.message}`, true);
    }
  };
  byId("ratio-input").addEventListener("input", () => { ratioState.touched = true; showSlider(); });
  byId("ratio-form").addEventListener("submit", (event) => { event.preventDefault(); send(Number(byId("ratio-input").value)); });
  byId("ratio-take").addEventListener("click", () => send(ratioState.picture.recommended));
}

function say(sentence, isProblem = false) {
  byId("ratio-said").replaceChildren(el("span", { class: isProblem ? "problem" : null }, sentence));
}
