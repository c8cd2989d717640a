// The numbers on top, the verdict, who waits, and the replicas: all from one status message.

import { byId, el, fill, setText } from "./dom.js";
import { NOTHING, clock, count, duration, number } from "./format.js";
import { drawVerdict } from "./verdict.js";

const speed = { tokens: null, uptime: 0, epoch: null, value: null };

/** Draws a status. `now`: the service's time in seconds since the epoch, or null if it isn't known. */
export function drawStatus(status, now) {
  for (const [name, text] of Object.entries(fields(status))) {
    for (const element of document.querySelectorAll(`[data-field="${name}"]`)) setText(element, text);
  }
  byId("numbers")?.querySelector('[data-field="ledger_error"]')?.closest(".stat")?.classList.toggle("bad", status.ledger_error !== 0);
  if (status.verdict) drawVerdict(status.verdict);
  drawWaits(status, now);
  drawEngines(status.engines);
}

/** Text by field, as the server writes it into the page (`fields.py`). */
export function fields(status) {
  const sum = (name) => status.engines.reduce((total, engine) => total + engine[name], 0);
  return {
    trained_step: count(status.trained_step),
    durable_step: count(status.durable_step),
    active_version: String(status.active_version),
    newest_version: String(status.newest_version),
    round: status.round ? String(status.round.round) : NOTHING,
    round_ready: status.round ? `${status.round.num_ready} / ${status.settings.train_batch_size}` : NOTHING,
    running: `${count(sum("running"))} / ${count(sum("slots"))}`,
    parked: count(status.samples.parked ?? 0),
    ready: count(status.ledger.ready),
    leased: count(status.ledger.leased),
    ratio: String(Number(status.settings.ratio.toPrecision(6))),
    ledger_error: String(status.ledger_error),
    tokens_per_s: tokensPerSecond(status, sum("tokens_generated")),
    oldest_waiting: status.oldest_waiting_s > 0 ? duration(status.oldest_waiting_s) : NOTHING,
  };
}

function tokensPerSecond(status, tokens) {
  const elapsed = status.uptime_s - speed.uptime;
  if (speed.epoch === status.service_epoch && elapsed > 0 && tokens >= speed.tokens) {
    const fresh = (tokens - speed.tokens) / elapsed;
    speed.value = speed.value === null ? fresh : 0.7 * speed.value + 0.3 * fresh; // a second alone jumps
  } else if (speed.epoch !== status.service_epoch) speed.value = null;
  Object.assign(speed, { tokens, uptime: status.uptime_s, epoch: status.service_epoch });
  return speed.value === null ? NOTHING : count(speed.value);
}

function drawWaits(status, now) {
  const waiting = status.waiting ?? status.waits.map((text) => ({ who: "rounds", waits_for: text, since: null }));
  const columns = [{ label: "Who" }, { label: "Waits for" }, { label: "Since" }, { label: "For", numeric: true }];
  fill(byId("waits-table"), columns, waiting.map((wait) => [
    wait.who, wait.waits_for, wait.since === null ? NOTHING : clock(wait.since), wait.since === null || now === null ? NOTHING : duration(now - wait.since),
  ]), "Nobody waits.");
}

function drawEngines(engines) {
  const columns = [{ label: "Replica" }, { label: "State" }, { label: "Running", numeric: true }, { label: "Version", numeric: true }, { label: "Tokens", numeric: true }, { label: "Restarts", numeric: true }];
  fill(byId("engines-table"), columns, engines.map((engine) => [
    engine.worker, engine.alive ? "alive" : "away", `${count(engine.running)} / ${count(engine.slots)}`, String(engine.version), number(engine.tokens_generated), count(engine.num_restarts),
  ]), "No replica yet.");
}
