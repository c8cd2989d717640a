"""What a round keeps of its engines: how many samples ran when, and how full the KV caches were."""

from collections.abc import Callable, Sequence
from typing import Any

from rollout_service.engines.interface import EngineStats

Line = dict[str, Any]

KV_INTERVAL_S = 0.1  # asking costs some microseconds, and an event comes every few
MAX_POINTS = 128  # of one round's curve of running samples; thinned to half when it is full


class RunningCurve:
    """Samples in the engines over time, with at most MAX_POINTS points however long the round is."""

    def __init__(self) -> None:
        self.points: list[tuple[float, int]] = []
        self._gap_s = 0.0

    def add(self, at_s: float, running: int) -> None:
        """So many run now, `at_s` seconds after the round began."""
        points = self.points
        if points and (at_s - points[-1][0] < self._gap_s or points[-1][1] == running):
            return
        points.append((round(at_s, 4), running))
        if len(points) >= MAX_POINTS:
            self.points = points[::2]
            self._gap_s = max(2 * self._gap_s, at_s / MAX_POINTS)


class KvWatch:
    """How full the KV caches were at the most in a round, and how many requests the engines preempted."""

    def __init__(self) -> None:
        self._looked_at = 0.0
        self._peak: float | None = None
        self._preempted_before: dict[tuple[str, int], int] = {}
        self._preempted: dict[tuple[str, int], int] = {}

    def look(self, now: float, replicas: Callable[[], Sequence[EngineStats]]) -> None:
        """Ask the engines, unless they were asked just now."""
        if now - self._looked_at < KV_INTERVAL_S:
            return
        self._looked_at = now
        for replica in replicas():
            if replica.kv_use is not None:
                self._peak = max(self._peak or 0.0, replica.kv_use)
            if replica.num_preemptions is not None:
                self._preempted[(replica.worker, replica.epoch)] = replica.num_preemptions

    def take(self) -> Line:
        """Fields of the round that ends; the next one begins."""
        fields: Line = {}
        if self._peak is not None:
            fields["kv_use"] = round(self._peak, 4)
        if self._preempted:
            before = sum(self._preempted_before.values())
            fields["num_preemptions"] = sum(self._preempted.values()) - before
        self._peak, self._preempted_before = None, dict(self._preempted)
        return fields
