"""How many new groups a round may take: the policies of `rollout.admission`.

Always true: a policy only ever asks for fewer groups than the lag bound and the buffer's caps allow, and for enough to
fill the batch where those allow it; a policy that asks for lengths is told predictions, never lengths.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

KV_SHARE = 0.95  # of the KV cache: predictions are means, and a sequence too many is preempted and prefilled again
PROMPTS_A_LOOK = 8  # beyond what the batch lacks; the next decision looks further
EVENTS_A_FORECAST = 16  # a round's in-flight samples are forecast this often at most: each costs about a microsecond


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected of a group: tokens of its longest sample, and prompt and response of a sample. 0: unknown."""

    longest: float = 0.0
    context: float = 0.0


UNKNOWN = Outlook()


class Forecast(Protocol):
    """Predicted lengths, in tokens, as the caller knows them at the moment of the decision."""

    def remaining(self, sample_id: str) -> float:
        """Tokens that an unfinished sample is expected to get."""
        ...

    def upcoming(self, count: int) -> Sequence[float]:
        """Tokens that the longest sample of each of the next `count` prompts is expected to have."""
        ...


@dataclass(frozen=True, slots=True)
class Demand:
    """Counts of groups at one moment. `target`: N'; `unspoken`: READY ones that no offered batch takes."""

    batch_groups: int
    target: int
    in_flight: int
    unspoken: int

    @property
    def missing(self) -> int:
        """READY groups that the batch still lacks."""
        return max(0, self.batch_groups - self.unspoken)


def fixed(demand: Demand) -> int:
    """N' groups a round, those that are READY counted: what finishes is not replaced (APRIL)."""
    return demand.target - demand.unspoken - demand.in_flight


def refill(demand: Demand) -> int:
    """N' groups in flight: what finishes is replaced at once."""
    return demand.target - demand.in_flight


def tapered(demand: Demand, most: int, finish: Sequence[float], upcoming: Sequence[float]) -> int:
    """Of `most` groups those that the batch lacks, and those that will finish before it is full.

    `finish` [in flight], ascending: predicted tokens until each group in flight is finished; `upcoming`: of the next
    prompts. All sequences get a token in the same step, so tokens are time: the batch is full after as many as the
    group that fills it still needs.
    """
    needed, admitted = demand.missing, 0
    if demand.in_flight >= needed and (not upcoming or not needed or upcoming[0] > _full_after(finish, needed)):
        return 0  # the common answer, at no cost of the groups in flight
    expected = list(finish)
    for predicted in upcoming[:most]:
        if demand.in_flight + admitted >= needed and (not needed or predicted > _full_after(expected, needed)):
            break
        bisect.insort(expected, predicted)
        admitted += 1
    return admitted


def _full_after(finish: Sequence[float], needed: int) -> float:
    return finish[min(needed, len(finish)) - 1] if finish else 0.0


def fitting(kv_tokens: int, running_context: float, context: float) -> int | None:
    """Samples whose whole expected context fits into the KV cache beside what runs; None if that is not known."""
    if not kv_tokens or context <= 0:
        return None
    return max(0, int((KV_SHARE * kv_tokens - running_context) / context))
