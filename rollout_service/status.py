"""The state of the service in one message, made when asked for and once a second while somebody listens."""

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from buffer.interface import Snapshot
from protocol.errors import FencedError, UnavailableError
from protocol.messages import EngineStatus, Status
from protocol.settings.rollout import RolloutSettings
from rollout_service.observer import Observer
from rollout_service.parts import ServiceParts
from rollout_service.picture_book import PictureBook
from rollout_service.pools import length_bias
from rollout_service.watch.broadcast import Broadcast
from rollout_service.watch.waits import LongPoll, LongPolls

RATE_OVER_S = 10.0  # tokens a second are over this time: long enough for a number that people can read
SNAPSHOT_PATIENCE_S = 3.0  # who watches is told that Redis is silent long before its connection times out
WAITS_EVERY_S = 1.0  # how exactly the begin of a wait is known, whether or not somebody asks; less than waits linger
RATE_EVERY_S = 1.0  # between two readings of the count, however often the status is asked for


class TokenRate:
    """Tokens a second of one engine, from readings of its count."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque()

    def read(self, now_s: float, tokens: int) -> float | None:
        """Take a reading; None until there are two a second apart, and after the count began anew."""
        readings = self._readings
        if readings and tokens < readings[-1][1]:
            readings.clear()
        if not readings or now_s - readings[-1][0] >= RATE_EVERY_S:
            readings.append((now_s, tokens))
        while len(readings) > 2 and now_s - readings[1][0] >= RATE_OVER_S:
            readings.popleft()
        began_s, before = readings[0]
        return (tokens - before) / (now_s - began_s) if now_s - began_s >= RATE_EVERY_S else None


class StatusBoard:
    """Makes status messages; a trainer counts as connected once it has opened a session with this process."""

    def __init__(self, parts: ServiceParts) -> None:
        self._parts = parts
        self._started_s = time.monotonic()
        self._heard_trainer_s: float | None = None
        self._trainer_metrics: dict[str, float] = {}
        self._rates: dict[str, TokenRate] = {}
        watch = parts.watch
        self._polls = LongPolls()
        self.observer = Observer(parts, watch, self._polls) if watch else None
        self.pictures = PictureBook(parts, watch, self.observer) if watch and self.observer else None
        self._broadcast = Broadcast(self._make_json, self._changes, int(time.time()))

    @property
    def stopping(self) -> bool:
        """Event streams have ended."""
        return self._broadcast.stopped

    def stop(self) -> None:
        """End every event stream."""
        self._broadcast.stop()

    async def close(self) -> None:
        """End the streams, and what is being predicted."""
        self.stop()
        if self.pictures is not None:
            await self.pictures.close()

    def long_poll(self, step: int) -> AbstractContextManager[LongPoll]:
        """While a trainer asks for the batch of `step`."""
        return self._polls.asking(step, self._parts.sample_parts.trace.now)

    @property
    def trainer_connected(self) -> bool:
        """A trainer has opened a session with this process, or went on with one."""
        return self._heard_trainer_s is not None

    def heard_trainer(self) -> None:
        """The trainer has called."""
        self._heard_trainer_s = time.monotonic()

    @property
    def trainer_silent_s(self) -> float | None:
        """For how long it has not called; None if it never did, 0 while it waits for a batch or an evaluation."""
        if self._heard_trainer_s is None:
            return None
        waits = self._polls.asked or self._parts.evaluations.running
        return 0.0 if waits else time.monotonic() - self._heard_trainer_s

    @property
    def trainer_metrics(self) -> dict[str, float]:
        """Metrics of the last step that the trainer reported."""
        return self._trainer_metrics

    async def reported(self, step: int, metrics: Mapping[str, float], trainer_epoch: int) -> None:
        """The trainer's metrics of a step. Raises FencedError unless they come from the newest session."""
        await self._check_trainer(trainer_epoch)
        metrics = {name: value for name, value in metrics.items() if name != "step"}
        self._trainer_metrics = {"step": float(step)} | metrics
        self.heard_trainer()
        self._parts.loop.autotune.trainer_reported(self._trainer_metrics)
        if self._parts.watch is not None:
            self._parts.watch.steps.put(step, metrics)

    def session_opened(self, durable_step: int) -> None:
        """A trainer goes on from this step: what was trained after it is of a history that was given up."""
        if self._parts.watch is not None:
            self._parts.watch.steps.go_back_to(durable_step)

    async def make(self) -> Status:
        """The state now. Raises UnavailableError within SNAPSHOT_PATIENCE_S while Redis doesn't answer."""
        parts = self._parts
        snapshot = await self._snapshot()
        control = parts.control
        return Status(
            run=parts.settings.run.name,
            service_epoch=snapshot.service_epoch,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._started_s,
            paused=control.paused,
            draining=control.draining,
            waits=[*([parts.delivery.trouble] if parts.delivery.trouble else []), *parts.loop.scheduler.waits],
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
            now=parts.sample_parts.trace.now(),
            verdict=self.observer.verdict(self.trainer_silent_s) if self.observer else None,
            waiting=self.observer.waiting(snapshot, self.trainer_connected) if self.observer else [],
        )

    async def _snapshot(self) -> Snapshot:
        buffer = self._parts.sample_parts.buffer
        try:
            async with asyncio.timeout(SNAPSHOT_PATIENCE_S):
                return await buffer.snapshot()
        except TimeoutError as error:
            since = buffer.waiting_since
            silent_s = SNAPSHOT_PATIENCE_S if since is None else max(SNAPSHOT_PATIENCE_S, time.time() - since)
            raise UnavailableError(
                f"Redis hasn't answered for {silent_s:.0f} s: look at it; the service waits and goes on by itself"
            ) from error

    async def _check_trainer(self, epoch: int) -> None:
        newest = (await self._snapshot()).trainer_epoch
        if epoch > newest:
            raise FencedError(f"no trainer session has the epoch {epoch}, the newest is {newest}: open one first")
        if epoch < newest:
            raise FencedError(
                f"trainer epoch {epoch} was superseded by epoch {newest}: stop this trainer, or open a new session"
            )

    async def keep_waits(self) -> None:
        """Notice waits for ever: since when they go on must not depend on when somebody first asks."""
        while True:
            self.note_waits()
            await asyncio.sleep(WAITS_EVERY_S)

    def note_waits(self) -> None:
        """Remember the begin of every wait that there is now."""
        if self.observer is not None and self._parts.loop.snapshot is not None:
            self.observer.waiting(self._parts.loop.snapshot, self.trainer_connected)

    def events(self) -> AsyncGenerator[bytes]:
        """Server-sent events for one listener, until the service stops."""
        return self._broadcast.stream()

    async def _make_json(self) -> str:
        return (await self.make()).model_dump_json()

    def _changes(self) -> Mapping[str, int]:
        return self.pictures.changes() if self.pictures else {}

    def _engines(self) -> list[EngineStatus]:
        now_s = time.monotonic()
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
                kv_use=s.kv_use,
                num_preemptions=s.num_preemptions,
                tokens_per_s=self._rates.setdefault(s.worker, TokenRate()).read(now_s, s.tokens_generated),
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
