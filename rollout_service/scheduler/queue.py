"""Waiting samples in the order in which they run.

Always true: a sample is in the queue once, under its newest key; those of groups with the oldest tokens come first,
those of groups without a token last; among equally old ones the lower `rank` (`rollout.order`) comes first; ties go
to the group admitted first. Each operation costs O(log n).
"""

import heapq
from collections.abc import Callable

NEVER = 1 << 62  # sorts behind every version

_Key = tuple[int, float, int, int]  # oldest version, rank, order of admission, index


class ResumeQueue:
    """A heap with lazy deletion."""

    def __init__(self) -> None:
        self._heap: list[tuple[_Key, str]] = []
        self._keys: dict[str, _Key] = {}

    def __len__(self) -> int:
        """Waiting samples."""
        return len(self._keys)

    def push(self, sample_id: str, oldest_version: int | None, rank: float, group_seq: int, index: int) -> None:
        """Add a sample, or change its place."""
        key = (NEVER if oldest_version is None else oldest_version, rank, group_seq, index)
        if self._keys.get(sample_id) != key:
            self._keys[sample_id] = key
            heapq.heappush(self._heap, (key, sample_id))

    def discard(self, sample_id: str) -> None:
        """Take a sample out, if it is in."""
        self._keys.pop(sample_id, None)

    def pop(self, count: int, held: Callable[[str], bool] | None = None) -> list[str]:
        """Take the `count` first, passing over those that are `held`, which keep their places."""
        taken: list[str] = []
        passed: list[tuple[_Key, str]] = []
        while self._heap and len(taken) < count:
            key, sample_id = heapq.heappop(self._heap)
            if self._keys.get(sample_id) != key:
                continue
            if held is not None and held(sample_id):
                passed.append((key, sample_id))
            else:
                del self._keys[sample_id]
                taken.append(sample_id)
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return taken
