"""Scorers in processes that can be killed.

Always true:
- there are `num_workers` slots; a slot runs one task, and is idle, busy or restarting;
- a task holds its slot only; one that hangs costs the others nothing but that slot, until `timeout_s` is over;
- a worker that didn't reply whole (time-out, death, a caller that gave up) is killed and replaced, never used again;
- a task whose worker died is tried once more on a new one: somebody else may have killed the worker, even while it was
  idle; what dies twice is the task's own failure;
- after `close` no process is left, and who still waited gets UnavailableError: their samples have not failed.
"""

import asyncio
import math
from typing import Any

from protocol.errors import DataError, UnavailableError
from protocol.samples import Reward
from protocol.states import FailReason
from rollout_service.rewards.interface import ScoringError, ScoringTask
from rollout_service.rewards.process import ScorerConfig, WorkerDiedError, WorkerProcess, WorkerTimeoutError

CLOSED = "the scorers are closed; the sample is scored when the service is up again"


class _Slot:
    """A place for one worker; empty while it is restarted."""

    def __init__(self) -> None:
        self.worker: WorkerProcess | None = None


class ScorerPool:
    """Implements `Scorer` with `num_workers` processes."""

    def __init__(self, config: ScorerConfig, num_workers: int, timeout_s: float) -> None:
        self._config = config
        self._timeout_s = timeout_s
        self._slots = [_Slot() for _ in range(num_workers)]
        self._idle: asyncio.Queue[_Slot | None] = asyncio.Queue()
        self._restarts: set[asyncio.Task[None]] = set()
        self._closed = False
        self.num_restarts = 0
        """Workers that were killed or died, and were replaced."""

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are up."""
        return [slot.worker.pid for slot in self._slots if slot.worker]

    async def start(self) -> None:
        """Start all workers; raises DataError if the scorer can't be loaded."""
        results = await asyncio.gather(*(self._fill(slot) for slot in self._slots), return_exceptions=True)
        for error in results:
            if error is not None:
                await self.close()
                raise error
        for slot in self._slots:
            self._idle.put_nowait(slot)

    async def score(self, task: ScoringTask) -> Reward:
        """The reward of one sample. Raises ScoringError, or UnavailableError if the pool is closed meanwhile."""
        slot = await self._take()
        whole = False
        try:
            reply = await self._run(slot, task)
            whole = True
        finally:
            self._give_back(slot, whole)
        return self._read(reply)

    async def close(self) -> None:
        """End the worker processes."""
        self._closed = True
        self._idle.put_nowait(None)
        for restart in self._restarts:
            restart.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        workers = [slot.worker for slot in self._slots if slot.worker]
        await asyncio.gather(*(worker.kill() for worker in workers))
        for slot in self._slots:
            slot.worker = None

    async def _take(self) -> _Slot:
        slot = None if self._closed else await self._idle.get()
        if slot is None or self._closed:
            self._idle.put_nowait(None)  # the next one that waits must learn it too
            raise UnavailableError(CLOSED)
        return slot

    async def _run(self, slot: _Slot, task: ScoringTask) -> dict[str, Any]:
        try:
            try:
                return await self._run_once(slot, task)
            except WorkerDiedError:
                await self._empty(slot)
                return await self._run_once(slot, task)
        except WorkerTimeoutError as error:
            raise self._failure(FailReason.REWARD_TIMEOUT, f"scoring took longer than {self._timeout_s:g} s") from error
        except (WorkerDiedError, DataError) as error:
            raise self._failure(FailReason.REWARD_ERROR, str(error)) from error

    async def _run_once(self, slot: _Slot, task: ScoringTask) -> dict[str, Any]:
        if slot.worker is None:
            await self._fill(slot)
        assert slot.worker is not None
        return await slot.worker.score(task, self._timeout_s)

    def _failure(self, reason: FailReason, message: str) -> ScoringError | UnavailableError:
        if self._closed:
            return UnavailableError(CLOSED)
        return ScoringError(reason, message)

    def _give_back(self, slot: _Slot, whole: bool) -> None:
        """The slot is idle again, at once or when its worker has been replaced."""
        if self._closed:
            return
        if whole:
            self._idle.put_nowait(slot)
            return
        restart = asyncio.get_running_loop().create_task(self._replace(slot), name="restart-scorer")
        self._restarts.add(restart)
        restart.add_done_callback(self._restarts.discard)

    async def _replace(self, slot: _Slot) -> None:
        await self._empty(slot)
        try:
            await self._fill(slot)
        except (DataError, OSError):
            slot.worker = None  # the next task of this slot tries again and reports what is wrong
        self._idle.put_nowait(slot)

    async def _empty(self, slot: _Slot) -> None:
        self.num_restarts += 1
        if slot.worker is not None:
            await slot.worker.kill()
            slot.worker = None

    async def _fill(self, slot: _Slot) -> None:
        worker = await WorkerProcess.spawn(self._config)
        if self._closed:
            await worker.kill()
            raise UnavailableError(CLOSED)
        slot.worker = worker

    @staticmethod
    def _read(reply: dict[str, Any]) -> Reward:
        if "reason" in reply:
            raise ScoringError(FailReason(reply["reason"]), reply["message"])
        value = reply["value"]
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ScoringError(FailReason.REWARD_NOT_FINITE, f"the scorer's process replied {value!r}")
        return Reward(float(value), {name: float(part) for name, part in reply["parts"].items()})
