"""Engines that die or hang: who ran on them is told to the scheduler, once a death, and they are started again.

Always true: a replica that is dead is being restarted, or its death is an event on its way; while one is being
restarted no policy is installed.
"""

import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from buffer.interface import SampleLease
from rollout_service.engines.stall import StallWatch
from rollout_service.events import Changed, EngineDied
from rollout_service.samples import SampleParts, SampleRunner
from rollout_service.scheduler.rounds import RoundScheduler

log = logging.getLogger(__name__)

Running = Mapping[str, tuple[SampleRunner, SampleLease]]
Spawn = Callable[[Coroutine[Any, Any, None]], None]


class EngineRecovery:
    """For the round loop, whose `running` samples it reads and whose task group it uses."""

    def __init__(self, parts: SampleParts, scheduler: RoundScheduler, running: Running, spawn: Spawn) -> None:
        self._parts = parts
        self._scheduler = scheduler
        self._running = running
        self._spawn = spawn
        self._lost: set[str] = set()
        self._timeout_s = parts.settings.engine.stall_timeout_s
        self._watch = StallWatch(self._timeout_s)
        self.restarting = False

    def died(self, worker: str) -> None:
        """A replica is dead: suspect who ran there, but for those whom its death was told of before."""
        there = [s for s, (runner, _) in self._running.items() if runner.worker == worker and s not in self._lost]
        if there:
            self._lost.update(there)
            self._scheduler.engine_died(there)
        if not self.restarting:
            self.restarting = True
            self._spawn(self._restart())

    def forget(self, sample_id: str) -> None:
        """The sample doesn't run any more."""
        self._lost.discard(sample_id)

    async def look(self) -> None:
        """Tell of replicas that died without anything running on them, and end those that hang."""
        for stats in self._parts.pool.stats():
            if not stats.alive:
                self._parts.mailbox.post(EngineDied(stats.worker))
        # While an install holds the engines, or tokens wait for the store, nothing comes out of an engine that is well.
        if self._scheduler.installing or self.restarting or self._parts.buffer.waiting_since is not None:
            self._watch.pause()
            return
        for worker in self._watch.stalled(self._parts.pool.stats(), time.monotonic()):
            log.error(
                "engine %s wrote nothing for %g s with requests running: it is restarted",
                worker,
                self._timeout_s,
                extra={"event": "engine_hangs", "worker": worker},
            )
            await self._parts.pool.kill(worker)
            self._parts.mailbox.post(EngineDied(worker))

    async def _restart(self) -> None:
        try:
            for worker in await self._parts.pool.restart_dead():
                about = {"event": "engine_restarted", "worker": worker}
                log.warning("engine %s was restarted with the active policy version", worker, extra=about)
        finally:
            self.restarting = False
            self._parts.mailbox.post(Changed())
