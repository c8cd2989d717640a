"""One log line a round: what it made, what it cost, and what it left in the buffer.

Always true:
- every offered batch has exactly one line, with the event `round`; a round that is suspended and goes on has none of
  its own;
- the counts are differences of the buffer's own, so they hold whatever happened in between; a field whose start this
  process did not see is None.
"""

import logging
import time

from buffer.interface import Snapshot
from protocol.states import SampleState
from protocol.watching import Cause
from rollout_service.scheduler.decisions import BeginRound, Decision, Park, RoundLimits
from rollout_service.watch.spending import FILLING

log = logging.getLogger(__name__)

IN_ROUND = FILLING | {Cause.CUT}  # slots that are idle then are the bubble
TOKENS_COUNTER = "tokens_appended"  # of the buffer: what was generated and kept


class RoundLog:
    """Watches the round loop: what it decides, and what is so when that is done."""

    def __init__(self, batch_groups: int) -> None:
        self._batch_groups = batch_groups
        self._state: tuple[float, int, int] | None = None  # since when, samples that run, slots
        self._idle_s = self._slot_s = 0.0
        self._round: int | None = None
        self._began_s = 0.0
        self._offered_s: float | None = None
        self._waited_s: float | None = None
        self._num_cut = 0
        self._before: Snapshot | None = None
        self._seen: Snapshot | None = None

    def stands(self, cause: Cause, running: int, slots: int) -> None:
        """What was decided is done; time in which no batch fills idles nobody."""
        now_s = self._pass()
        self._state = (now_s, running, slots) if cause in IN_ROUND else None

    def decided(self, decision: Decision, snapshot: Snapshot | None) -> None:
        """A decision is about to be carried out, on these counts of the buffer."""
        self._seen = snapshot
        self._before = self._before or snapshot
        match decision:
            case BeginRound(number, target) if number != self._round:
                self._begin(number)
                log.debug("round %d: filling the batch, %d groups in flight at most", number, target)
            case Park(sample_ids, cut=True):
                self._num_cut += len(sample_ids)
            case _:
                pass

    def offered(self, number: int, limits: RoundLimits, wish: float | None) -> None:
        """The batch of round `number` was offered just now. `wish`: the ratio that the controller wants."""
        seen, before = self._seen, self._before
        assert seen is not None, "decisions follow a snapshot"
        assert before is not None, "it was set by the first decision"
        now_s = self._pass()
        known = self._round == number
        tokens = seen.counters.get(TOKENS_COUNTER, 0) - before.counters.get(TOKENS_COUNTER, 0)
        took_s = now_s - (self._began_s if self._offered_s is None else self._offered_s)
        fields = {
            "event": "round",
            "round": number,
            "duration_s": _rounded(now_s - self._began_s if known else None),
            "waited_s": _rounded(self._waited_s),
            "ready": _total_ready(seen) - _total_ready(before),
            "cut": self._num_cut,
            "parked": seen.samples.get(SampleState.PARKED, 0),
            "surplus": max(0, seen.ledger.ready - (seen.offered + 1) * self._batch_groups),
            "fresh": seen.ledger.admitted - before.ledger.admitted,
            "dropped": seen.ledger.dropped - before.ledger.dropped,
            "tokens": tokens,
            "tokens_per_s": _rounded(tokens / took_s if known and took_s > 0 else None, 1),
            "bubble_share": _rounded(self._idle_s / self._slot_s if self._slot_s else None, 4),
            "ratio": limits.ratio,
            "ratio_wish": wish,
            "samples_ratio": limits.samples_ratio,
            "version": seen.active_version,
            "step": seen.trained_step,
            "ledger_error": seen.ledger.error,
        }
        log.log(logging.ERROR if seen.ledger.error else logging.INFO, "%s", _sentence(fields), extra=fields)
        self._before, self._offered_s, self._num_cut = seen, now_s, 0

    def _begin(self, number: int) -> None:
        self._round, self._began_s = number, time.monotonic()
        self._waited_s = None if self._offered_s is None else self._began_s - self._offered_s
        self._idle_s = self._slot_s = 0.0

    def _pass(self) -> float:
        """Account for the time up to now."""
        now_s = time.monotonic()
        if self._state is not None:
            since_s, running, slots = self._state
            self._slot_s += (now_s - since_s) * slots
            self._idle_s += (now_s - since_s) * max(0, slots - running)
            self._state = (now_s, running, slots)
        return now_s


def _total_ready(snapshot: Snapshot) -> int:
    """Groups that ever became READY and were not dropped afterwards."""
    ledger = snapshot.ledger
    return ledger.ready + ledger.leased + ledger.consumed


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def _sentence(fields: dict[str, int | float | str | None]) -> str:
    ready = fields["ready"]
    parts = [f"round {fields['round']}: {ready} {'group' if ready == 1 else 'groups'}"]
    if fields["duration_s"] is not None:
        parts[0] += f" in {fields['duration_s']:.1f} s"
    if fields["tokens_per_s"] is not None:
        parts.append(f"{fields['tokens_per_s']:,.0f} tokens/s")
    if fields["bubble_share"] is not None:
        parts.append(f"{fields['bubble_share']:.0%} of slot time idle")
    parts.append(f"{fields['cut']} samples cut, {fields['parked']} parked, {fields['surplus']} groups surplus")
    parts.append(f"policy v{fields['version']}")
    if fields["ledger_error"]:
        parts.append(f"THE LEDGER IS OUT OF BALANCE by {fields['ledger_error']}")
    return ", ".join(parts)
