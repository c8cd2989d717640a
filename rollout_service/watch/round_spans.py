"""From a line of the trace to a round as it is drawn: bubble, tail, and where the time went."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from protocol.watching import Cause, RoundSpan
from rollout_service.tuning.trace_records import TracedLimits

TAIL_FROM = 0.9  # of the batch: what is READY later is the tail
CAUSES = {cause.value: cause for cause in Cause}


def span_of(line: Mapping[str, Any], limits: TracedLimits | None) -> RoundSpan:
    """A round from its line; `limits` tells what older lines do not: the slots."""
    slots = line.get("slots") or (limits.slots if limits else 0)
    ended_at = line["offered_at"]
    running = [(float(at), int(count)) for at, count in line["running"]]
    bubble = line.get("bubble_share")
    if bubble is None and ended_at is not None:
        bubble = bubble_share(running, ended_at - line["started_at"], slots)
    batch = limits.train_batch_size if limits else 0
    return RoundSpan.model_construct(
        round=line["round"],
        started_at=line["started_at"],
        cut_at=line["cut_at"],
        offered_at=ended_at,
        active_version=line["active_version"],
        slots=slots,
        ready_s=list(line["ready_s"]),
        running=running,
        bubble_share=bubble,
        tail_s=tail_s(line, batch),
        kv_use=line.get("kv_use"),
        num_preemptions=line.get("num_preemptions"),
        num_fresh=line["num_fresh"],
        num_dropped=line["num_dropped"],
        surplus_groups=line["surplus_groups"],
        open_groups=line["open_groups"],
        parked_samples=line["parked_samples"],
        spent={CAUSES[name]: seconds for name, seconds in line.get("spent", {}).items() if name in CAUSES},
    )


def tail_s(line: Mapping[str, Any], batch_groups: int) -> float | None:
    """Seconds from the time at which TAIL_FROM of the batch was READY to its cut; None before it is offered.

    Groups that were READY when the round began are surplus of the rounds before: the batch and what is left of it
    now, less those that became READY in this round.
    """
    if line["offered_at"] is None or not batch_groups:
        return None
    ready: Sequence[float] = line["ready_s"]
    before = max(0, batch_groups + line["surplus_groups"] - len(ready))
    index = math.ceil(TAIL_FROM * batch_groups) - before - 1
    end_s = (line["cut_at"] or line["offered_at"]) - line["started_at"]
    reached_s = ready[min(index, len(ready) - 1)] if index >= 0 and ready else 0.0
    return max(0.0, end_s - reached_s)


def bubble_share(running: Sequence[tuple[float, int]], duration_s: float, slots: int) -> float | None:
    """Idle slots x time of all slots x time, from the curve of running samples; None if nothing is known."""
    if not running or duration_s <= 0 or not slots:
        return None
    idle = max(0, slots - running[0][1]) * running[0][0]
    for (at, count), (after, _) in pairwise([*running, (max(duration_s, running[-1][0]), 0)]):
        idle += max(0, slots - count) * (after - at)
    return idle / (slots * max(duration_s, running[-1][0]))


def with_spent(rounds: Sequence[RoundSpan], installs: Sequence[tuple[int, float, float]]) -> list[RoundSpan]:
    """Rounds of older traces, which don't say where the time went, with what can be told from their times.

    Within a round idle slots are the tail's; between two, what no install took was spent waiting for the trainer.
    """
    known: list[RoundSpan] = []
    for span in rounds:
        if not span.spent and span.offered_at is not None:
            took_s = span.offered_at - span.started_at
            idle_s = took_s * (span.bubble_share or 0.0)
            spent = {Cause.GENERATING: took_s - idle_s, Cause.TAIL: idle_s}
            before = known[-1].offered_at if known else None
            if before is not None and before < span.started_at:
                overlaps = (min(end, span.started_at) - max(start, before) for _, start, end in installs)
                installing_s = min(span.started_at - before, sum(max(0.0, overlap) for overlap in overlaps))
                spent[Cause.WEIGHT_SYNC] = installing_s
                spent[Cause.TRAINER] = span.started_at - before - installing_s
            known.append(span.model_copy(update={"spent": spent}))
        else:
            known.append(span)
    return known
