"""A scorer whose calls are measured, for whoever wants to know."""

import time
from collections.abc import Callable

from protocol.samples import Reward
from protocol.states import FailReason
from rollout_service.rewards.interface import Scorer, ScoringError, ScoringTask

Scored = Callable[[ScoringTask, float, FailReason | None], None]


class MeasuredScorer:
    """Implements `Scorer` by another one, and tells `told` of each call that returned: seconds, and why it failed.

    A call that is cancelled, or whose pool closes, is not told of: it is made again later.
    """

    def __init__(self, inner: Scorer) -> None:
        self.inner = inner
        self.told: Scored | None = None
        self._begun: dict[object, float] = {}

    @property
    def num_waiting(self) -> int:
        """Calls that have not returned."""
        return len(self._begun)

    @property
    def longest_wait_s(self) -> float:
        """For how long the oldest of them has been under way."""
        return time.perf_counter() - min(self._begun.values()) if self._begun else 0.0

    async def start(self) -> None:
        """See `Scorer`."""
        await self.inner.start()

    async def score(self, task: ScoringTask) -> Reward:
        """See `Scorer`."""
        call, began_s = object(), time.perf_counter()
        self._begun[call] = began_s
        try:
            reward = await self.inner.score(task)
        except ScoringError as error:
            self._tell(task, began_s, error.reason)
            raise
        finally:
            del self._begun[call]
        self._tell(task, began_s, None)
        return reward

    async def close(self) -> None:
        """See `Scorer`."""
        await self.inner.close()

    def _tell(self, task: ScoringTask, began_s: float, failed: FailReason | None) -> None:
        if self.told is not None:
            self.told(task, time.perf_counter() - began_s, failed)
