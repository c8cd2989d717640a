"""Notices an engine that lives and writes nothing: a core that hangs, or that somebody stopped.

Always true: a replica is said to stall only after it had requests running, and no token came out of it, for the whole
of the time-out without a pause; time in which it is held, or in which nobody takes its tokens, doesn't count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_service.engines.interface import EngineStats


@dataclass(frozen=True, slots=True)
class _Progress:
    epoch: int
    tokens_generated: int
    since_s: float


class StallWatch:
    """Compares what the replicas have written with what they had; owns no clock."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._seen: dict[str, _Progress] = {}

    def stalled(self, stats: Sequence[EngineStats], now_s: float) -> list[str]:
        """Replicas that have stalled, each once."""
        return [replica.worker for replica in stats if self._stalls(replica, now_s)]

    def pause(self) -> None:
        """The time until the next look doesn't count."""
        self._seen.clear()

    def _stalls(self, replica: EngineStats, now_s: float) -> bool:
        if not replica.alive or not replica.num_running:
            self._seen.pop(replica.worker, None)
            return False
        seen = self._seen.get(replica.worker)
        if seen is None or (seen.epoch, seen.tokens_generated) != (replica.epoch, replica.tokens_generated):
            self._seen[replica.worker] = _Progress(replica.epoch, replica.tokens_generated, now_s)
            return False
        if now_s - seen.since_s < self._timeout_s:
            return False
        del self._seen[replica.worker]
        return True
