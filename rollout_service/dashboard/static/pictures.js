// Every picture but the timeline and the ratio, from the messages in protocol/watching.py.

import { CAUSE_COLOURS, causeText } from "./causes.js";
import { alignCurves, chart } from "./charts.js";
import { byId, fill, fillStats, setText } from "./dom.js";
import { NOTHING, bytes, clock, count, duration, number, percent } from "./format.js";

const MAX_RUNNING_ROUNDS = 5; // more lines than this can't be told apart
const MAX_BARS = 90; // more steps than this are an area: bars would be thinner than a hair
const MAX_MOMENTS = 180; // three pixels each: more is noise
const LAG_BUCKETS = [["0", "0"], ["1", "1"], ["2", "2"], ["3_4", "3–4"], ["5_8", "5–8"], ["9_up", "9+"]];
const LAG_ENDS = [0, 1, 2, 4, 8, Infinity];

const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6, 1e7];
const POWERS_OF_TWO = Array.from({ length: 50 }, (_, i) => 2 ** i);
const ROUND_TIMES = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400];

const countAxis = { format: count, min: 0, incrs: WHOLE, atLeast: [0, 4] };
const timeAxis = { format: duration, min: 0, incrs: ROUND_TIMES };
const shareAxis = { format: percent, min: 0, atLeast: [0, 0.01] };
const wholeShare = { format: percent, min: 0, max: 1 };
const NO_STEP = "No step has been trained yet.";
const NO_ROUND = "No round is over yet.";

/** The tail. */
export function drawTail(tail) {
  setText(byId("tail-note"), `Of ${count(tail.num_finished)} finished and ${count(tail.num_unfinished)} unfinished responses.`);
  const columns = ["", "p50", "p90", "p99", "largest"].map((label, i) => ({ label, numeric: i > 0 }));
  const row = (name, q, format) => [name, format(q.p50), format(q.p90), format(q.p99), format(q.largest)];
  fill(byId("tail-table"), columns, tail.num_finished + tail.num_unfinished === 0 ? [] : [
    row("Tokens, finished responses", tail.tokens, number), row("Tokens, survival estimate", tail.survival_tokens, number), row("Time to finish", tail.finish_s, duration),
  ], "No response is finished yet.");
  setText(byId("tail-bias"), biasOf(tail));
  drawCurve("tail-tokens", "tokens", [["finished", tail.token_curve, { width: 3, alpha: "88" }], ["trained", tail.trained_curve, { dash: [6, 4], colour: "c1" }]], number);
  drawCurve("tail-seconds", "time to finish", [["time to finish", tail.finish_curve, {}]], duration);
  drawSurvival(tail.survival);
  const bins = tail.by_length;
  chart("tail-rewards", {
    x: bins.map((b) => Math.max(1, (b.shortest + b.longest) / 2)), xLabel: "tokens", logX: true, curve: true, y: { ...wholeShare, max: undefined, atLeast: [0, 1] }, empty: "No response is scored yet.",
    series: [{ label: "mean reward", values: bins.map((b) => b.mean_reward), points: true }, { label: "ended by itself", values: bins.map((b) => b.stop_share), points: true, colour: "c2" }],
  });
  const slow = [{ label: "Prompt" }, { label: "Source" }, { label: "Seen", numeric: true }, { label: "Mean longest, tokens", numeric: true }, { label: "Parked", numeric: true }];
  fill(byId("stragglers-table"), slow, tail.stragglers.map((s) => [s.prompt, s.source || NOTHING, count(s.times_seen), number(s.mean_longest), count(s.num_parks)]),
    "No prompt has been seen often enough to say.");
}

function biasOf(tail) {
  if (!tail.trained_tokens || !tail.dispatched_tokens) return "";
  const bias = tail.trained_tokens / tail.dispatched_tokens - 1;
  const side = Math.abs(bias) < 0.01 ? "as long as" : bias < 0 ? `${percent(-bias)} shorter than` : `${percent(bias)} longer than`;
  return `Trained responses have ${number(tail.trained_tokens)} tokens on average, ${side} those that were started (${number(tail.dispatched_tokens)}).`;
}

/** What can't be drawn on a logarithmic axis, 0, is left out. */
const positive = (curve) => curve.filter(([x, share]) => x > 0 && share > 0);

function drawCurve(id, label, curves, format) {
  const { x, values } = alignCurves(curves.map(([, curve]) => positive(curve)));
  chart(id, {
    x, xLabel: label, xFormat: format, logX: true, curve: true, y: { format: percent, log: true }, empty: "No response is finished yet.",
    series: curves.map(([name, , look], i) => ({ label: name, values: values[i], step: true, ...look })),
  });
}

function drawSurvival(survival) {
  const curve = positive(survival);
  chart("tail-survival", {
    x: curve.map(([x]) => x), xLabel: "tokens", logX: true, curve: true, y: { format: percent, log: true }, bands: [[3, 2]], empty: "No response is finished yet.",
    series: [
      { label: "estimate", values: curve.map((p) => p[1]), step: true },
      { label: "lower end", values: curve.map((p) => (p[2] > 0 ? p[2] : null)), step: true, width: 0.6, colour: "c4" },
      { label: "upper end", values: curve.map((p) => (p[3] > 0 ? p[3] : null)), step: true, width: 0.6, colour: "c4" },
    ],
  });
}

/** Running sequences, idle slots, durations, flow and what is unfinished, from the timeline. */
export function drawRounds(timeline) {
  const rounds = timeline.rounds;
  const done = rounds.filter((r) => r.offered_at !== null);
  drawRunning(rounds.filter((r) => r.running.length).slice(-MAX_RUNNING_ROUNDS));
  const byRound = { x: done.map((r) => r.round), xLabel: "round", wholeX: true, empty: NO_ROUND };
  const points = done.length < 40;
  chart("bubble-rounds", { ...byRound, y: { ...shareAxis, atLeast: [0, 0.25] }, series: [{ label: "idle", values: done.map((r) => r.bubble_share), points, colour: "c1", area: true }] });
  chart("kv-rounds", { ...byRound, y: wholeShare, empty: "The engine doesn't say.", series: [{ label: "KV cache in use", values: done.map((r) => r.kv_use), points, colour: "c7" }] });
  drawDurations(done, byRound);
  const at = (name) => done.map((r) => r[name]);
  chart("buffer-flow", {
    ...byRound, y: countAxis,
    series: [
      { label: "new", values: at("num_fresh") }, { label: "became ready", values: done.map((r) => r.ready_s.length), colour: "c2" }, { label: "surplus kept", values: at("surplus_groups"), colour: "c5" },
      { label: "dropped", values: at("num_dropped"), colour: "c6" }, { label: "still open", values: at("open_groups"), colour: "c4" },
    ],
  });
  chart("parked-rounds", { ...byRound, y: countAxis, series: [{ label: "parked or running on", values: at("parked_samples"), colour: "c1", bars: true }] });
  drawUnfinished(timeline);
}

/** The newest round in full, those before it pale: what counts is the shape of the decay. */
function drawRunning(last) {
  const { x, values } = alignCurves(last.map((r) => r.running));
  const slots = last.length ? last[last.length - 1].slots : 0;
  const series = last.map((r, i) => {
    const newest = i === last.length - 1;
    return { label: `round ${r.round}`, values: values[i], step: true, width: newest ? 2 : 1.4, colour: newest ? "c0" : "c4", alpha: newest ? "" : ["33", "55", "77", "99"][i + 5 - last.length] ?? "99" };
  });
  chart("running-rounds", {
    x, xLabel: "time since the round began", xFormat: duration, curve: true, y: countAxis, empty: NO_ROUND,
    series: [...series, { label: `${count(slots)} slots`, values: x.map(() => slots), dash: [4, 4], colour: "c6", width: 1 }],
  });
}

function drawDurations(done, byRound) {
  const causes = Object.keys(CAUSE_COLOURS).filter((cause) => done.some((r) => (r.spent?.[cause] ?? 0) > 0)).reverse();
  const spent = causes.map((cause) => ({ label: causeText(cause), values: done.map((r) => r.spent?.[cause] ?? 0), colour: CAUSE_COLOURS[cause], bars: true }));
  const whole = [
    { label: "round", values: done.map((r) => r.offered_at - r.started_at) },
    { label: "after 90 % of the batch", values: done.map((r) => r.tail_s), colour: "c1" },
  ];
  chart("seconds-rounds", { ...byRound, y: timeAxis, ...(causes.length ? { stacked: true, series: spent } : { series: whole }) });
}

/** Tokens that unfinished responses have, by how many versions ago they were written. */
function drawUnfinished(timeline) {
  const active = timeline.rounds.at(-1)?.active_version ?? 0;
  const tokens = LAG_ENDS.map(() => 0);
  for (const [, , , reward, failed, attempts] of timeline.samples) {
    const how = attempts.at(-1)?.[4];
    if (reward !== null || failed !== null || how === "stop" || how === "length") continue;
    for (const attempt of attempts) for (const [version, written] of attempt[7]) tokens[LAG_ENDS.findIndex((end) => active - version <= end)] += written;
  }
  chart("buffer-lag", {
    ...lagBars, y: countAxis, empty: "No response is unfinished.",
    series: [{ label: "tokens", values: tokens.some((n) => n > 0) ? tokens : tokens.map(() => null), bars: true, colour: "c7" }],
  });
}

const lagBars = { x: LAG_BUCKETS.map((_, i) => i), xLabel: "versions behind", xName: "lag", xTexts: LAG_BUCKETS.map(([, text]) => text), curve: true };

const mean = (values) => values.reduce((sum, v) => sum + v, 0) / values.length;
const most = (values) => Math.max(...values);

/** Means, or `by` something else, of as many neighbours as leave MAX_MOMENTS. */
function thin(values, by = mean) {
  const each = Math.ceil(values.length / MAX_MOMENTS);
  return Array.from({ length: Math.ceil(values.length / each) }, (_, i) => {
    const known = values.slice(i * each, (i + 1) * each).filter((v) => v !== null);
    return known.length ? by(known) : null;
  });
}

/** The buffer and the engines over time. */
export function drawMoments(moments) {
  const x = thin(moments.at, most);
  const draw = (id, y, ...lines) => chart(id, {
    x, xLabel: "time of day", xFormat: clock, time: true, y, empty: "Nothing was measured yet.",
    series: lines.map(([name, label, { by, ...look }]) => ({ label, values: thin(moments.series[name] ?? [], by), ...look })),
  });
  draw("running-moments", countAxis, ["running", "running", { area: true }], ["slots", "slots", { dash: [4, 4], colour: "c6", width: 1 }]);
  draw("speed-moments", { format: number, min: 0 }, ["tokens_per_s", "tokens/s", { area: true, colour: "c2" }]);
  draw("buffer-samples", countAxis, ["queued", "queued", { colour: "c4" }], ["running", "running", {}], ["parked", "parked", { colour: "c1" }], ["scoring", "being scored", { colour: "c3" }]);
  draw("buffer-groups", countAxis, ["open", "open", {}], ["ready", "ready", { colour: "c2" }], ["leased", "leased", { colour: "c7" }], ["ledger_error", "ledger error", { colour: "c6", by: most }]);
  draw("buffer-bytes", { format: bytes, min: 0, incrs: POWERS_OF_TWO }, ["held_bytes", "all", { area: true }], ["parked_bytes", "parked", { colour: "c1" }]);
  draw("buffer-age", { ...timeAxis, atLeast: [0, 1] }, ["oldest_waiting_s", "waits longest", { colour: "c1", area: true, by: most }]);
  draw("oldest-lag", countAxis, ["oldest_lag", "oldest token that waits", { colour: "c7", step: true, by: most }], ["active_lag", "version that generates", { colour: "c4", step: true, by: most }]);
}

/** Groups by state; `error` is what the states don't add up to. */
export function drawLedger(ledger, error) {
  fillStats(byId("ledger"), [...["admitted", "open", "ready", "leased", "consumed", "dropped"].map((name) => [name, count(ledger[name])]), ["error", String(error), null, error !== 0]]);
}

/** The trainer's metrics by step. */
export function drawSteps(picture) {
  const at = (name) => picture.series[name] ?? [];
  const lines = (id, y, ...names) => chart(id, {
    x: picture.steps, xLabel: "step", wholeX: true, y, empty: NO_STEP, series: names.map(([name, label, look]) => ({ label, values: at(name), ...look })),
  });
  drawLags(picture, at);
  lines("ess", { format: percent, max: 1, atLeast: [0.98, 1] }, ["importance/ess", "all tokens", { width: 2.4, alpha: "88" }], ...byLag("importance_by_lag/ess"));
  lines("clipped", shareAxis, ["importance/clipped_share", "weight cut", {}], ["importance/left_out_share", "left out", { colour: "c6" }], ["actor/pg_clipfrac", "ratio clipped", { colour: "c2", dash: [5, 3] }]);
  lines("kl", { format: number, atLeast: [0, 1e-3] }, ["off_policy/kl_behaviour_proximal", "k3", {}], ["off_policy/kl_behaviour_proximal_k1", "k1", { colour: "c1" }], ["actor/ppo_kl", "drift in the step", { colour: "c2" }]);
  lines("mismatch", { format: number, min: 0, atLeast: [0, 1e-3] }, ...byLag("mismatch_by_lag/mean"));
  lines("reward", { format: number, atLeast: [0, 1] }, ["reward/mean", "mean", { width: 3, alpha: "88" }], ["reward/rewarded_and_stopped", "rewarded and ended by itself", { colour: "c2", dash: [5, 3] }]);
  lines("lengths", { format: number, min: 0 }, ["response/length_p50", "p50", { colour: "c4" }], ["response/length_mean", "mean", { width: 2.2 }], ["response/length_p99", "p99", { colour: "c1" }], ["response/length_max", "longest", { colour: "c3", dash: [3, 3] }]);
  lines("ended", { ...shareAxis, max: 1.02 }, ["response/stopped_share", "ended by itself", { colour: "c2" }], ["response/truncated_share", "truncated", { colour: "c6" }], ["reward/groups_without_spread", "groups without spread", { colour: "c4" }]);
  lines("times", timeAxis, ["timing_s/step", "step", { width: 2.2 }], ["timing_s/wait", "of it, waits for its batch", { colour: "c1" }]);
  drawEvaluation(picture, at);
}

const byLag = (prefix) => LAG_BUCKETS.map(([name, text], i) => [`${prefix}_${name}`, `lag ${text}`, { colour: `l${i}`, width: 1.4 }]);

function drawLags(picture, at) {
  const share = (name) => picture.steps.map((_, i) => at(`lag/share_${name}`)[i] ?? 0);
  const bars = picture.steps.length <= MAX_BARS;
  // The oldest lies on top: the taller the warm colours, the staler the batch.
  const shares = LAG_BUCKETS.map(([name, text], i) => ({ label: `lag ${text}`, values: share(name), colour: `l${i}`, bars })).filter((s) => s.values.some((v) => v > 0)).reverse();
  chart("lag-shares", { x: picture.steps, xLabel: "step", wholeX: true, y: wholeShare, stacked: true, series: shares, empty: NO_STEP });
  chart("lag-last", {
    ...lagBars, y: { ...shareAxis, max: 1 }, empty: NO_STEP,
    series: [{ label: "share of tokens", values: LAG_BUCKETS.map(([name]) => at(`lag/share_${name}`).at(-1) ?? null), bars: true }],
  });
}

function drawEvaluation(picture, at) {
  const kept = picture.steps.map((_, i) => i).filter((i) => Object.keys(picture.series).some((name) => name.startsWith("eval/") && (at(name)[i] ?? null) !== null));
  // An evaluation that ran beside training is reported some steps after its own.
  const x = kept.map((i) => at("eval/step")[i] ?? picture.steps[i]);
  const pick = (name, label, look) => ({ label, values: kept.map((i) => at(name)[i] ?? null), points: true, ...look });
  const empty = "Nothing was evaluated yet: trainer.test_freq and trainer.val_before_train say when it is.";
  chart("eval-reward", { x, xLabel: "step", wholeX: true, y: { format: number, atLeast: [0, 1] }, empty, series: [pick("eval/reward", "mean reward", { width: 2.2 }), pick("eval/truncated_share", "truncated share", { colour: "c6" })] });
  chart("eval-lengths", { x, xLabel: "step", wholeX: true, y: { format: number, min: 0 }, empty, series: [pick("eval/length_mean", "mean", { width: 2.2 }), pick("eval/length_p99", "p99", { colour: "c1" })] });
}
