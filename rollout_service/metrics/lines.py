"""What is observed as it happens: histograms and counters that are fed by the lines of the trace, as they are made.

Always true: a line costs some microseconds and never raises for what it lacks; what is remembered of unfinished samples
and groups is bounded, and what was forgotten (or began before this process) is left out of the histograms that need its
past, not counted wrong.
"""

from collections import OrderedDict
from dataclasses import dataclass
from math import ceil
from typing import Any

from prometheus_client import CollectorRegistry

from protocol.states import FinishReason
from protocol.watching import Cause
from rollout_service.metrics.catalogue import SERVICE_CATALOGUE
from rollout_service.tuning.trace_recorder import group_of

MAX_REMEMBERED = 200_000  # unfinished samples (and as many groups): some tens of megabytes, more are nowhere in flight
TAIL_SHARE = 0.9  # of the batch: what comes after is the tail


@dataclass(slots=True)
class _Past:
    """What earlier attempts at an unfinished sample told. `parked_s` is None if it isn't known."""

    started_at: float
    parked_s: float | None = 0.0
    num_segments: int = 0
    num_resumes: int = 0


@dataclass(slots=True)
class _Group:
    """A group of which samples have started: when it was admitted, and how many of its samples have a reward."""

    admitted_at: float
    num_scored: int = 0
    num_failed: int = 0


class LineMetrics:
    """Takes the lines of one service's trace; see `tuning.trace_records` for what is in them."""

    def __init__(self, registry: CollectorRegistry, batch_groups: int, group_samples: int) -> None:
        self._batch_groups = batch_groups
        self._group_samples = group_samples
        self._past: OrderedDict[str, _Past] = OrderedDict()
        self._groups: OrderedDict[str, _Group] = OrderedDict()
        self._offered_at: float | None = None
        self._parked_at: list[float] = []  # in this round
        self.moment: dict[str, float] = {}
        """Values of the last moment; see `trace_records.MomentLine`."""
        self._observe_samples(registry)
        self._observe_rounds(registry)

    def _observe_samples(self, registry: CollectorRegistry) -> None:
        catalogue = SERVICE_CATALOGUE
        self._group_s = catalogue.histogram("april_group_seconds", registry)
        self._sample_s = catalogue.histogram("april_sample_seconds", registry)
        self._queued_s = catalogue.histogram("april_sample_queued_seconds", registry)
        self._parked_s = catalogue.histogram("april_sample_parked_seconds", registry)
        self._segments = catalogue.histogram("april_sample_segments", registry)
        self._resumes = catalogue.histogram("april_sample_resumes", registry)
        tokens = catalogue.histogram("april_sample_tokens", registry)
        self._tokens = {reason.value: tokens.labels(reason.value) for reason in FinishReason}
        self._reprefilled = catalogue.counter("april_reprefilled_tokens_total", registry)

    def _observe_rounds(self, registry: CollectorRegistry) -> None:
        catalogue = SERVICE_CATALOGUE
        self._round_s = catalogue.histogram("april_round_seconds", registry)
        self._nth_s = catalogue.histogram("april_round_nth_finish_seconds", registry)
        self._tail_s = catalogue.histogram("april_round_tail_seconds", registry)
        self._bubble = catalogue.histogram("april_round_bubble_share", registry)
        self._slot_s = catalogue.counter("april_slot_seconds_total", registry)
        self._idle_slot_s = catalogue.counter("april_idle_slot_seconds_total", registry)
        spent = catalogue.counter("april_spent_seconds_total", registry)
        self._spent = {cause.value: spent.labels(cause.value) for cause in Cause}
        self._cut_s = catalogue.histogram("april_round_cut_seconds", registry)
        self._park_s = catalogue.histogram("april_park_seconds", registry)
        self._stragglers = catalogue.histogram("april_round_stragglers", registry)
        self._surplus = catalogue.histogram("april_round_surplus_groups", registry)
        self._idle_s = catalogue.histogram("april_service_idle_seconds", registry)
        self._stall_s = catalogue.histogram("april_policy_stall_seconds", registry)

    def __call__(self, line: dict[str, Any]) -> None:
        """One line, as the recorder made it."""
        match line["kind"]:
            case "attempt":
                self._attempt(line)
            case "score":
                self._score(line)
            case "round":
                self._round(line)
            case "install":
                self._stall_s.observe(line["ended_at"] - line["started_at"])
            case "moment":
                self.moment = line["values"]
            case _:
                pass

    # Samples

    def _attempt(self, line: dict[str, Any]) -> None:
        past = self._past.get(line["sample"])
        if past is None:
            past = self._begin(line)
        else:
            past.num_resumes += 1
            waited_s = line["waited_s"]
            past.parked_s = None if past.parked_s is None or waited_s is None else past.parked_s + waited_s
        past.num_segments += len(line["segments"])
        if line["before"]:
            self._reprefilled.inc(line["prompt_tokens"] + line["before"])
        if line["end"] in self._tokens:
            self._finished(line, past)
        elif line["end"] == "parked":
            self._parked_at.append(line["ended_at"])

    def _begin(self, line: dict[str, Any]) -> _Past:
        past = self._past[line["sample"]] = _Past(line["started_at"])
        _forget_oldest(self._past)
        if line["before"] or line["waited_s"] is None:
            past.parked_s = None  # it began before this service did, or under another id
            return past
        self._queued_s.observe(line["waited_s"])
        if line["group"] not in self._groups:
            self._groups[line["group"]] = _Group(line["started_at"] - line["waited_s"])
            _forget_oldest(self._groups)
        return past

    def _finished(self, line: dict[str, Any], past: _Past) -> None:
        del self._past[line["sample"]]
        self._tokens[line["end"]].observe(line["before"] + sum(segment[1] for segment in line["segments"]))
        if past.parked_s is None:
            return
        self._sample_s.observe(line["ended_at"] - past.started_at)
        self._segments.observe(past.num_segments)
        self._resumes.observe(past.num_resumes)
        if past.num_resumes:
            self._parked_s.observe(past.parked_s)

    def _score(self, line: dict[str, Any]) -> None:
        if line["failed"] is not None:
            self._past.pop(line["sample"], None)
        group_id = group_of(line["sample"])
        group = self._groups.get(group_id)
        if group is None:
            return
        if line["failed"] is None:
            group.num_scored += 1
        else:
            group.num_failed += 1
        if group.num_scored + group.num_failed >= self._group_samples:
            del self._groups[group_id]
            if group.num_scored:
                self._group_s.observe(max(0.0, line["at"] - group.admitted_at))

    # Rounds

    def _round(self, line: dict[str, Any]) -> None:
        started_at, offered_at = line["started_at"], line["offered_at"]
        if self._offered_at is not None:
            self._idle_s.observe(max(0.0, started_at - self._offered_at))
        self._offered_at = offered_at
        self._round_s.observe(offered_at - started_at)
        self._surplus.observe(line["surplus_groups"])
        for cause, seconds in line["spent"].items():
            self._spent[cause].inc(seconds)
        self._ready(sorted(line["ready_s"]), offered_at - started_at)
        self._cut(line["cut_at"], offered_at)
        if (share := line["bubble_share"]) is not None:
            slot_s = max(0.0, offered_at - started_at) * (line["slots"] or 0)
            self._bubble.observe(share)
            self._slot_s.inc(slot_s)
            self._idle_slot_s.inc(slot_s * share)

    def _ready(self, ready_s: list[float], lasted_s: float) -> None:
        if len(ready_s) >= self._batch_groups:
            self._nth_s.observe(ready_s[self._batch_groups - 1])
        num_after = self._batch_groups - ceil(TAIL_SHARE * self._batch_groups)
        if ready_s:
            self._tail_s.observe(max(0.0, lasted_s - ready_s[max(0, len(ready_s) - 1 - num_after)]))

    def _cut(self, cut_at: float | None, offered_at: float) -> None:
        parked_at, self._parked_at = self._parked_at, []
        if cut_at is None:
            self._stragglers.observe(0)
            return
        self._cut_s.observe(offered_at - cut_at)
        took_s = [at - cut_at for at in parked_at if at >= cut_at]
        self._stragglers.observe(len(took_s))
        for seconds in took_s:
            self._park_s.observe(seconds)


def _forget_oldest(remembered: OrderedDict[str, Any]) -> None:
    if len(remembered) > MAX_REMEMBERED:
        remembered.popitem(last=False)
