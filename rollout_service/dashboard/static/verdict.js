// The verdict: the sentence, what to change, where the time of the last rounds went, and the numbers behind both.

import { CAUSE_COLOURS, causeText } from "./causes.js";
import { byId, el, setText } from "./dom.js";
import { count, duration, number, percent, words } from "./format.js";

const SHOWN_SHARE = 0.005; // less would be a stripe that nobody sees
const FACTS = {
  round_s: ["a round takes", duration], bubble_share: ["idle slots", percent], last_tenth_share: ["after 90 % of the batch", percent], used_slots_share: ["slots in use", percent],
  trainer_wait_share: ["trainer waits", percent], install_s: ["an install takes", duration], reward_s: ["a score takes", duration], kv_use: ["KV cache in use", percent],
  preemptions_per_round: ["preemptions a round", number], failed_share: ["failed responses", percent], dropped_share: ["dropped groups", percent], redis_away_s: ["Redis is away for", duration],
};
const CAPTION = ["num_rounds", "seconds"]; // said above the bar

/** The sentence on top, and what it rests on. */
export function drawVerdict(verdict) {
  byId("verdict").dataset.limit = verdict.limit;
  setText(byId("verdict-limit"), words(verdict.limit));
  setText(byId("verdict-sentence"), verdict.sentence);
  setText(byId("verdict-advice"), verdict.advice);
  const { measured } = verdict;
  const causes = Object.keys(CAUSE_COLOURS).filter((cause) => measured[`${cause}_share`] >= SHOWN_SHARE);
  byId("verdict-spent").hidden = causes.length === 0;
  setText(byId("verdict-over"), measured.num_rounds > 0 ? `Time of ${measured.num_rounds === 1 ? "the last round" : `the last ${count(measured.num_rounds)} rounds`}, ${duration(measured.seconds)}` : "");
  byId("verdict-bar").replaceChildren(...causes.map((cause) => stripe(cause, measured[`${cause}_share`])));
  byId("verdict-causes").replaceChildren(...causes.map((cause) =>
    el("div", {}, el("dt", {}, swatch(cause), causeText(cause)), el("dd", {}, percent(Number(measured[`${cause}_share`].toFixed(3)))))));
  const facts = Object.entries(measured).filter(([name]) => !CAPTION.includes(name) && !(name.endsWith("_share") && name.slice(0, -6) in CAUSE_COLOURS));
  const order = Object.keys(FACTS);
  facts.sort(([a], [b]) => (order.indexOf(a) + 1 || order.length + 1) - (order.indexOf(b) + 1 || order.length + 1));
  byId("verdict-measured").replaceChildren(...facts.map(([name, value]) => {
    const [label, format] = FACTS[name] ?? [words(name), number];
    return el("div", {}, el("dt", {}, label), el("dd", {}, format(format === percent ? Number(value.toFixed(3)) : value)));
  }));
}

function stripe(cause, share) {
  const part = el("span", { title: `${causeText(cause)}: ${percent(share)}` });
  part.style.flexGrow = String(share);
  part.style.background = `var(--${CAUSE_COLOURS[cause]})`;
  return part;
}

function swatch(cause) {
  const mark = el("i", { class: "swatch" });
  mark.style.background = `var(--${CAUSE_COLOURS[cause]})`;
  return mark;
}
