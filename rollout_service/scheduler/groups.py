"""What the scheduler knows of the groups that are not leased yet.

Always true: each sample of a group in flight is in exactly one of waiting, running and ended; `ages` counts groups by
the version of their oldest token, those in flight and those that are READY apart.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from rollout_service.scheduler.deadlines import Ages
from rollout_service.scheduler.queue import ResumeQueue


@dataclass(slots=True)
class TrackedGroup:
    """One group in flight. `oldest_version`: of its oldest token, or of the version that may be writing its first."""

    group_id: str
    seq: int
    samples: dict[str, int]
    oldest_version: int | None = None
    waiting: set[str] = field(default_factory=set[str])


class GroupTable:
    """Groups and samples in flight, and the ages of groups."""

    def __init__(self) -> None:
        self.groups: dict[str, TrackedGroup] = {}
        self.running: dict[str, None] = {}
        self.ages = Ages()
        self._group_of: dict[str, TrackedGroup] = {}
        self._queue = ResumeQueue()

    @property
    def num_waiting(self) -> int:
        """Samples that wait for a slot."""
        return len(self._queue)

    def add(self, group_id: str, seq: int, samples: Iterable[tuple[str, int]], oldest_version: int | None) -> None:
        """A group in flight and its samples that are not terminal, as (sample id, index), all waiting."""
        group = TrackedGroup(group_id, seq, dict(samples))
        self.groups[group_id] = group
        for sample_id in group.samples:
            self._group_of[sample_id] = group
            group.waiting.add(sample_id)
        self._set_oldest(group, oldest_version)

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
            self._group_of[sample_id].waiting.discard(sample_id)
            self.running[sample_id] = None
        for sample_id in taken:
            group = self._group_of[sample_id]
            if group.oldest_version is None or active_version < group.oldest_version:
                self._set_oldest(group, active_version)
        return taken

    def park(self, sample_id: str) -> None:
        """A running sample waits again."""
        self.running.pop(sample_id, None)
        group = self._group_of.get(sample_id)
        if group is not None:
            group.waiting.add(sample_id)
            self._queue.push(sample_id, group.oldest_version, group.seq, group.samples[sample_id])

    def end(self, sample_id: str) -> None:
        """A sample ended, and runs no more; its group stays until it is closed."""
        self.running.pop(sample_id, None)
        self._queue.discard(sample_id)
        if sample_id in self._group_of:
            self._group_of[sample_id].waiting.discard(sample_id)

    def close(self, group_id: str, ready: bool) -> None:
        """The group is READY, or DROPPED."""
        group = self.groups.pop(group_id, None)
        if group is None:
            return
        for sample_id in group.samples:
            self._queue.discard(sample_id)
            self.running.pop(sample_id, None)
            self._group_of.pop(sample_id, None)
        self.ages.leave_flight(group.oldest_version)
        if ready:
            self.ages.add_ready(group.oldest_version)

    def _set_oldest(self, group: TrackedGroup, version: int | None) -> None:
        if group.group_id in self.groups:
            self.ages.leave_flight(group.oldest_version)
        group.oldest_version = version
        self.ages.enter_flight(version)
        for sample_id in group.waiting:
            self._queue.push(sample_id, version, group.seq, group.samples[sample_id])
