"""Which groups a round must still finish, so that no trained token is older than `max_lag` versions.

A group whose oldest token has version v must be in a batch that is trained on version v + max_lag or earlier: that is
its deadline. Batches take the READY groups with the oldest tokens first (earliest deadline first), so a batch may be
offered when the groups that it leaves behind still fit into the batches after it: with f the version that the batch
being filled is trained on, for every k >= 0

    open(k) + max(0, ready(k) - N * batches) <= N * k

where open(k) and ready(k) count groups in flight and READY groups with a deadline of at most f + k, and `batches` are
those that READY groups fill by then (the offered ones and this one). k = 0 says that nothing stays behind that is due
now. The admission bound keeps the total feasible; this keeps younger groups that finish earlier from taking the places
of older ones.
"""

import bisect
import heapq
from collections import Counter
from itertools import accumulate


class Ages:
    """Groups by the version of their oldest token; groups without a token have no deadline yet."""

    def __init__(self) -> None:
        self._in_flight: Counter[int] = Counter()
        self._ready: list[int] = []  # a heap, since leases take the oldest

    def enter_flight(self, version: int | None) -> None:
        """A group is in flight."""
        if version is not None:
            self._in_flight[version] += 1

    def leave_flight(self, version: int | None) -> None:
        """A group is no longer in flight, or its version changes."""
        if version is not None:
            self._in_flight[version] -= 1
            if not self._in_flight[version]:
                del self._in_flight[version]

    def add_ready(self, version: int | None) -> None:
        """A group is READY."""
        if version is not None:
            heapq.heappush(self._ready, version)

    def keep_ready(self, count: int) -> None:
        """There are `count` READY groups left: leases took the oldest of those known here."""
        while len(self._ready) > count:
            heapq.heappop(self._ready)

    def oldest_admissible(
        self, count: int, active: int, fill_version: int, max_lag: int, batch_groups: int, offered: int
    ) -> int:
        """The oldest token that `count` new groups may have, so that all groups can still be trained in time.

        Groups whose oldest token is of u or older must fit into the batches up to that of u + max_lag. READY ones may
        be in batches that are offered; those in flight, and new ones, only in those from f = `fill_version` on:

            open(u) + count + max(0, ready(u) - N * offered) <= N * (u + max_lag - f + 1)

        for every u from theirs on; where u is the active version, the admission bound has seen to it.
        """
        oldest = active
        while oldest > 0:
            older = oldest - 1
            in_flight = sum(groups for version, groups in self._in_flight.items() if version <= older)
            left_ready = max(0, sum(version <= older for version in self._ready) - batch_groups * offered)
            if in_flight + count + left_ready > batch_groups * (older + max_lag - fill_version + 1):
                break
            oldest = older
        return oldest

    def num_blocking(self, fill_version: int, max_lag: int, batch_groups: int, batches: int) -> int:
        """Groups in flight that must finish before the batch being filled may be offered."""
        if not self._in_flight:
            return 0
        versions = sorted(self._in_flight)
        open_up_to = list(accumulate(self._in_flight[v] for v in versions))
        ready = sorted(self._ready)
        blocking = 0
        for version, num_open in zip(versions, open_up_to, strict=True):
            after = max(0, version + max_lag - fill_version)
            left_ready = max(0, bisect.bisect_right(ready, version) - batch_groups * batches)
            blocking = max(blocking, min(num_open, num_open + left_ready - batch_groups * after))
        return blocking
