"""What the scheduler knows of the groups that are not leased yet.

Always true: each sample of a group in flight is in exactly one of waiting, running and ended; `ages` counts groups by
the version of their oldest token, those in flight and those that are READY apart; `running_context` is what the samples
that run are expected to have in the end.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from protocol.settings.rollout import RoundOrder
from rollout_service.scheduler.admission import UNKNOWN, Outlook
from rollout_service.scheduler.deadlines import Ages
from rollout_service.scheduler.queue import ResumeQueue

FIRST = -math.inf  # ranks before every prediction


@dataclass(slots=True)
class TrackedGroup:
    """One group in flight. `oldest_version`: of its oldest token, or of the version that may be writing its first.

    `rank`: its place among groups with equally old tokens; `num_left`: samples that have not ended.
    """

    group_id: str
    seq: int
    samples: dict[str, int]
    oldest_version: int | None = None
    outlook: Outlook = UNKNOWN
    rank: float = 0.0
    num_left: int = 0
    waiting: set[str] = field(default_factory=set[str])


class GroupTable:
    """Groups and samples in flight, and the ages of groups."""

    def __init__(self, order: RoundOrder = RoundOrder.FIFO) -> None:
        self.order = order
        self.groups: dict[str, TrackedGroup] = {}
        self.running: dict[str, None] = {}
        self.running_context = 0.0
        self.ages = Ages()
        self._group_of: dict[str, TrackedGroup] = {}
        self._untouched: dict[str, TrackedGroup] = {}
        self._queue = ResumeQueue()
        self._context = 0.0

    @property
    def num_waiting(self) -> int:
        """Samples that wait for a slot."""
        return len(self._queue)

    @property
    def mean_context(self) -> float:
        """Expected context of a sample in the end, over the groups in flight; 0 if nothing is known."""
        return self._context / len(self.groups) if self.groups else 0.0

    def add(
        self,
        group_id: str,
        seq: int,
        samples: Iterable[tuple[str, int]],
        oldest_version: int | None,
        outlook: Outlook = UNKNOWN,
    ) -> None:
        """A group in flight and its samples that are not terminal, as (sample id, index), all waiting."""
        group = TrackedGroup(group_id, seq, dict(samples), outlook=outlook)
        group.num_left = len(group.samples)
        self.groups[group_id] = group
        self._context += outlook.context
        for sample_id in group.samples:
            self._group_of[sample_id] = group
            group.waiting.add(sample_id)
        match self.order:
            case RoundOrder.LONGEST_FIRST:
                group.rank = -outlook.longest
            case RoundOrder.FEWEST_OPEN:
                group.rank = group.num_left
            case RoundOrder.FIFO:
                pass
        if oldest_version is None:
            self._untouched[group_id] = group
        self._set_oldest(group, oldest_version)

    def new_round(self) -> None:
        """Groups without a token were passed over for a whole round: they come before new ones, whatever their rank."""
        for group in self._untouched.values():
            if self.order is not RoundOrder.FIFO and group.rank != FIRST:
                self._set_rank(group, FIRST)

    def take(self, count: int, active_version: int, held: frozenset[str] = frozenset()) -> tuple[str, ...]:
        """The next samples to run, of groups not `held`; they count as running now, written by `active_version`."""
        taken = tuple(self._queue.pop(count, (lambda s: self._group_of[s].group_id in held) if held else None))
        return self._run(taken, active_version)

    def take_of(self, group_id: str, count: int, active_version: int) -> tuple[str, ...]:
        """The same, of one group only."""
        waiting = sorted(self.groups[group_id].waiting)[:count] if group_id in self.groups else []
        for sample_id in waiting:
            self._queue.discard(sample_id)
        return self._run(tuple(waiting), active_version)

    def sample_ids(self, group_id: str) -> tuple[str, ...]:
        """Samples of a group that were not terminal when it came here."""
        return tuple(self.groups[group_id].samples) if group_id in self.groups else ()

    def finish(self, remaining: Callable[[str], float]) -> list[float]:
        """[in flight], ascending: the most that `remaining` says of each group's samples that have not ended."""
        return sorted(self._remaining(group, remaining) for group in self.groups.values())

    def _remaining(self, group: TrackedGroup, remaining: Callable[[str], float]) -> float:
        unfinished = (s for s in group.samples if s in group.waiting or s in self.running)
        return max((remaining(s) for s in unfinished), default=0.0)

    def is_waiting(self, group_id: str) -> bool:
        """Whether the group is in flight and none of its samples runs."""
        group = self.groups.get(group_id)
        return group is not None and not any(sample_id in self.running for sample_id in group.samples)

    def waiting(self, group_id: str) -> tuple[str, ...]:
        """Samples of a group in flight that wait, in the order of their ids."""
        return tuple(sorted(self.groups[group_id].waiting))

    def group_ids(self, sample_ids: Iterable[str]) -> set[str]:
        """Groups in flight that these samples are of."""
        return {self._group_of[s].group_id for s in sample_ids if s in self._group_of}

    def _run(self, taken: tuple[str, ...], active_version: int) -> tuple[str, ...]:
        for sample_id in taken:
            group = self._group_of[sample_id]
            group.waiting.discard(sample_id)
            self.running[sample_id] = None
            self.running_context += group.outlook.context
        for sample_id in taken:
            group = self._group_of[sample_id]
            if group.oldest_version is None or active_version < group.oldest_version:
                self._untouched.pop(group.group_id, None)
                self._set_oldest(group, active_version)
        return taken

    def park(self, sample_id: str) -> None:
        """A running sample waits again."""
        self._stop(sample_id)
        group = self._group_of.get(sample_id)
        if group is not None:
            group.waiting.add(sample_id)
            self._push(group, sample_id)

    def end(self, sample_id: str) -> None:
        """A sample ended, and runs no more; its group stays until it is closed."""
        self._stop(sample_id)
        self._queue.discard(sample_id)
        group = self._group_of.get(sample_id)
        if group is not None:
            group.waiting.discard(sample_id)
            group.num_left -= 1
            if self.order is RoundOrder.FEWEST_OPEN and group.rank != FIRST:
                self._set_rank(group, group.num_left)

    def close(self, group_id: str, ready: bool) -> None:
        """The group is READY, or DROPPED."""
        group = self.groups.pop(group_id, None)
        if group is None:
            return
        for sample_id in group.samples:
            self._queue.discard(sample_id)
            self._stop(sample_id)
            self._group_of.pop(sample_id, None)
        self._untouched.pop(group_id, None)
        self._context -= group.outlook.context
        self.ages.leave_flight(group.oldest_version)
        if ready:
            self.ages.add_ready(group.oldest_version)

    def _stop(self, sample_id: str) -> None:
        if sample_id in self.running:
            del self.running[sample_id]
            self.running_context -= self._group_of[sample_id].outlook.context

    def _set_oldest(self, group: TrackedGroup, version: int | None) -> None:
        if group.group_id in self.groups:
            self.ages.leave_flight(group.oldest_version)
        group.oldest_version = version
        self.ages.enter_flight(version)
        self._push(group, *group.waiting)

    def _set_rank(self, group: TrackedGroup, rank: float) -> None:
        group.rank = rank
        self._push(group, *group.waiting)

    def _push(self, group: TrackedGroup, *sample_ids: str) -> None:
        for sample_id in sample_ids:
            self._queue.push(sample_id, group.oldest_version, group.rank, group.seq, group.samples[sample_id])
