"""The order in which waiting samples run.

Always true: a waiting sample is in the queue once; what is popped is the most urgent. Urgent ones (of must-finish
groups) come first, then parked ones by their group's oldest version, then new ones; ties go to the group admitted
first. Each operation costs O(log n).
"""

import heapq
from dataclasses import dataclass

NEVER = 1 << 62  # sorts behind every version


@dataclass(frozen=True, slots=True, order=True)
class _Key:
    not_urgent: bool
    oldest_version: int
    group_seq: int
    index: int


class ResumeQueue:
    """A heap with lazy deletion."""

    def __init__(self) -> None:
        self._heap: list[tuple[_Key, str]] = []
        self._keys: dict[str, _Key] = {}

    def __len__(self) -> int:
        """Waiting samples."""
        return len(self._keys)

    def __contains__(self, sample_id: str) -> bool:
        """Whether this sample waits."""
        return sample_id in self._keys

    def push(self, sample_id: str, oldest_version: int | None, group_seq: int, index: int, urgent: bool) -> None:
        """Add a sample, or change its place."""
        key = _Key(not urgent, NEVER if oldest_version is None else oldest_version, group_seq, index)
        self._keys[sample_id] = key
        heapq.heappush(self._heap, (key, sample_id))

    def discard(self, sample_id: str) -> None:
        """Take a sample out, if it is in."""
        self._keys.pop(sample_id, None)

    def pop(self, count: int) -> list[str]:
        """Take the `count` first."""
        taken: list[str] = []
        while self._heap and len(taken) < count:
            key, sample_id = heapq.heappop(self._heap)
            if self._keys.get(sample_id) == key:
                del self._keys[sample_id]
                taken.append(sample_id)
        return taken
