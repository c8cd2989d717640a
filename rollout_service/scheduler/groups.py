"""What the scheduler knows of the groups that are in flight.

Always true: each sample of a known group is in exactly one of waiting, running and terminal; a group is forgotten when
the buffer says that it is READY or DROPPED. `must_finish` holds the known groups whose oldest token would exceed the
lag bound if they waited one batch more.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

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
    """Groups and samples in flight."""

    def __init__(self) -> None:
        self.groups: dict[str, TrackedGroup] = {}
        self.running: dict[str, None] = {}
        self.must_finish: set[str] = set()
        self._group_of: dict[str, TrackedGroup] = {}
        self._queue = ResumeQueue()
        self._threshold: int | None = None

    @property
    def num_waiting(self) -> int:
        """Samples that wait for a slot."""
        return len(self._queue)

    def add(self, group_id: str, seq: int, samples: Iterable[tuple[str, int]], oldest_version: int | None) -> None:
        """A group in flight and its samples that are not terminal, as (sample id, index), all waiting."""
        group = TrackedGroup(group_id, seq, dict(samples), oldest_version)
        self.groups[group_id] = group
        self._judge(group)
        for sample_id in group.samples:
            self._group_of[sample_id] = group
            self._enqueue(group, sample_id)

    def set_threshold(self, version: int) -> None:
        """Groups whose oldest version is at most `version` must finish in this round."""
        if version == self._threshold:
            return
        self._threshold = version
        self.must_finish.clear()
        for group in self.groups.values():
            self._judge(group)

    def take(self, count: int, active_version: int) -> tuple[str, ...]:
        """The next samples to run; they count as running from now on, written by `active_version`."""
        taken = tuple(self._queue.pop(count))
        for sample_id in taken:
            self._group_of[sample_id].waiting.discard(sample_id)
            self.running[sample_id] = None
        for sample_id in taken:
            group = self._group_of[sample_id]
            if group.oldest_version is None or active_version < group.oldest_version:
                group.oldest_version = active_version
                self._judge(group)
        return taken

    def park(self, sample_id: str) -> None:
        """A running sample waits again."""
        self.running.pop(sample_id, None)
        group = self._group_of.get(sample_id)
        if group is not None:
            self._enqueue(group, sample_id)

    def end(self, sample_id: str) -> None:
        """A running sample ended; it needs no slot any more, its group stays until it is forgotten."""
        self.running.pop(sample_id, None)

    def forget(self, group_id: str) -> None:
        """The group is READY or DROPPED."""
        group = self.groups.pop(group_id, None)
        self.must_finish.discard(group_id)
        for sample_id in group.samples if group else ():
            self._queue.discard(sample_id)
            self.running.pop(sample_id, None)
            self._group_of.pop(sample_id, None)

    def _enqueue(self, group: TrackedGroup, sample_id: str) -> None:
        group.waiting.add(sample_id)
        urgent = group.group_id in self.must_finish
        self._queue.push(sample_id, group.oldest_version, group.seq, group.samples[sample_id], urgent)

    def _judge(self, group: TrackedGroup) -> None:
        oldest = group.oldest_version
        if self._threshold is None or oldest is None or oldest > self._threshold:
            return
        if group.group_id not in self.must_finish:
            self.must_finish.add(group.group_id)
            for sample_id in list(group.waiting):
                self._enqueue(group, sample_id)
