"""The state of the service in one message, made when asked for and once a second while somebody listens."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from typing import Any

from protocol.errors import UnavailableError
from protocol.messages import EngineStatus, Status
from protocol.settings.rollout import RolloutSettings
from rollout_service.parts import ServiceParts
from rollout_service.pools import length_bias

EVENT_INTERVAL_S = 1.0  # people read it; faster costs the loop and shows nothing more


class StatusBoard:
    """Makes status messages; a trainer counts as connected once it has opened a session with this process."""

    def __init__(self, parts: ServiceParts) -> None:
        self._parts = parts
        self._started_s = time.monotonic()
        self.trainer_connected = False
        self.stopping = False
        self._trainer_metrics: dict[str, float] = {}

    @property
    def trainer_metrics(self) -> dict[str, float]:
        """Metrics of the last step that the trainer reported."""
        return self._trainer_metrics

    @trainer_metrics.setter
    def trainer_metrics(self, metrics: dict[str, float]) -> None:
        self._trainer_metrics = metrics
        self._parts.loop.autotune.trainer_reported(metrics)

    async def make(self) -> Status:
        """The state now."""
        parts = self._parts
        snapshot = await parts.buffer.snapshot()
        control = parts.control
        return Status(
            run=parts.settings.run.name,
            service_epoch=snapshot.service_epoch,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._started_s,
            paused=control.paused,
            draining=control.draining,
            waits=list(parts.loop.scheduler.waits),
            active_version=snapshot.active_version,
            newest_version=snapshot.newest_version,
            trainer_epoch=snapshot.trainer_epoch,
            trainer_connected=self.trainer_connected,
            offered=snapshot.offered,
            leased_steps=list(snapshot.leased_steps),
            trained_step=snapshot.trained_step,
            durable_step=snapshot.durable_step,
            samples=dict(snapshot.samples),
            oldest_waiting_s=parts.loop.oldest_waiting_s,
            ledger=snapshot.ledger,
            ledger_error=snapshot.ledger.error,
            round=parts.loop.round_status(),
            engines=self._engines(),
            counters=dict(snapshot.counters) | {f"dropped:{r.value}": c for r, c in snapshot.dropped.items()},
            settings=self._live(parts.settings.rollout),
            trainer_metrics=self.trainer_metrics,
            num_train_prompts=parts.num_train_prompts,
            redis_pid=parts.redis.pid if parts.redis else None,
            autotune=parts.loop.autotune.status(),
            pool=snapshot.pool,
            pool_error=snapshot.pool.error,
            length_bias=length_bias(snapshot.counters),
        )

    async def events(self) -> AsyncIterator[str]:
        """The status as server-sent events, until the service stops."""
        while not self.stopping:
            try:
                yield f"event: status\ndata: {(await self.make()).model_dump_json()}\n\n"
            except UnavailableError as error:
                yield f"event: unavailable\ndata: {json.dumps(str(error))}\n\n"
            await asyncio.sleep(EVENT_INTERVAL_S)

    def _engines(self) -> list[EngineStatus]:
        return [
            EngineStatus(
                worker=s.worker,
                epoch=s.epoch,
                slots=s.slots,
                running=s.num_running,
                version=s.version,
                alive=s.alive,
                tokens_generated=s.tokens_generated,
                num_restarts=s.num_restarts,
            )
            for s in self._parts.pool.stats()
        ]

    def _live(self, rollout: RolloutSettings) -> dict[str, Any]:
        control = self._parts.control
        return {
            "n": rollout.n,
            "train_batch_size": self._parts.settings.data.train_batch_size,
            "ratio": control.ratio,
            "samples_ratio": control.samples_ratio,
            "lookahead": control.lookahead,
            "max_lag": control.max_lag,
        }
