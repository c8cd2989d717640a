"""One policy of rounds on an engine that it shares with others, a round at a time.

Always true: with lookahead 0 a round begins when the step before it is trained, so between two turns nothing of this
contender runs; every turn trains one batch and publishes its weights, and the version that writes is this contender's,
because the turn begins with the install of it.
"""

import asyncio
import shutil
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.long_tail_parts.engine import EngineWork, ForcedPool, prompt_tokens
from buffer.memory import MemoryBuffer
from protocol.batch import Batch, decode_batch
from protocol.manifest import write_manifest
from protocol.samples import Prompt, Reward
from protocol.settings import RunSettings
from rollout_service.events import Mailbox
from rollout_service.parts import ServiceParts, assemble_parts
from rollout_service.prompts.interface import PromptSet
from rollout_service.rewards.interface import ScoringTask
from rollout_service.samples import SampleParts
from rollout_service.sessions import TrainerSessions
from rollout_service.status import StatusBoard

PATIENCE_S = 600.0  # a round takes seconds on quiet cores


class FreeScorer:
    """A score that takes no time."""

    async def start(self) -> None:
        """Nothing to start."""

    async def score(self, task: ScoringTask) -> Reward:
        """Half of the responses are right."""
        return Reward(float(task.num_tokens % 2))

    async def close(self) -> None:
        """Nothing to end."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One round: its time, what the engine did, and the batch that it filled."""

    seconds: float
    work: EngineWork
    num_tokens: int
    num_samples: int
    lag_sum: int
    max_lag: int
    num_lagging: int
    num_resumed_tokens: int
    num_mixed: int


class Contender:
    """A service over a shared pool, and a trainer that takes no time."""

    def __init__(self, parts: ServiceParts, pool: ForcedPool, model: Path) -> None:
        self._parts, self._pool, self._model = parts, pool, model
        self._sessions = TrainerSessions(parts, StatusBoard(parts))
        self._epoch = 0
        self._step = 0
        self.first: Batch | None = None

    async def open(self) -> None:
        """A session, and the first round, which begins at once."""
        self._epoch = (await self._sessions.open(0)).trainer_epoch
        self.first = await self._lease()

    async def turn(self) -> Turn:
        """Train the batch that is leased, publish, and wait until the next one is there."""
        folder = self._parts.settings.weights_root / f"step-{self._step}"
        shutil.copytree(self._model, folder)
        (folder / "manifest.json").unlink()
        write_manifest(folder, self._step)
        if self._step > 1:
            await self._sessions.ack(self._step - 1, self._epoch)
        self._pool.look()
        began_s = time.perf_counter()
        await self._sessions.publish(self._step, folder.name, self._epoch)
        batch = await self._lease()
        seconds = time.perf_counter() - began_s
        return _turn(batch, self._pool.look(), seconds)

    async def _lease(self) -> Batch:
        leased = await self._parts.delivery.lease(self._step + 1, self._epoch, PATIENCE_S)
        if leased is None:
            waits = "; ".join(self._parts.loop.scheduler.waits)
            raise TimeoutError(f"no batch within {PATIENCE_S:g} s; the service waits for {waits}")
        self._step += 1
        return decode_batch(leased[0])


def _turn(batch: Batch, work: EngineWork, seconds: float) -> Turn:
    response = batch.versions >= 0
    lags = batch.header.policy_version - batch.versions[response]
    starts, ends = batch.sample_offsets[:-1], batch.sample_offsets[1:]
    newest = np.concatenate([np.full(e - s, batch.versions[e - 1]) for s, e in zip(starts, ends, strict=True)])
    return Turn(
        seconds=seconds,
        work=work,
        num_tokens=int(response.sum()),
        num_samples=len(starts),
        lag_sum=int(lags.sum()),
        max_lag=int(lags.max()),
        num_lagging=int((lags > 0).sum()),
        num_resumed_tokens=int((batch.versions < newest)[response].sum()),
        num_mixed=sum(len({span.version for span in sample.segments}) > 1 for sample in batch.header.samples),
    )


@asynccontextmanager
async def contending(
    settings: RunSettings, pool: ForcedPool, model: Path, num_prompts: int
) -> AsyncGenerator[Contender]:
    """A service that has begun its first round; parked and ended at the end."""
    buffer = MemoryBuffer()
    service_epoch = await buffer.claim_service("benchmark")
    sample_parts = SampleParts(
        owner="benchmark",
        settings=settings,
        buffer=buffer,
        pool=pool,
        scorer=FreeScorer(),
        mailbox=Mailbox(),
        decode=lambda _: "",
        stop_token_ids=frozenset(),
    )
    train = tuple(Prompt(f"p:{i}", prompt_tokens(i), "", "benchmark") for i in range(num_prompts))
    parts = assemble_parts(settings, sample_parts, None, PromptSet(train, (), 0), service_epoch)
    rounds = asyncio.create_task(parts.loop.run())
    contender = Contender(parts, pool, model)
    opening = asyncio.create_task(contender.open())
    try:
        done, _ = await asyncio.wait({rounds, opening}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        yield contender
    finally:
        opening.cancel()
        await parts.loop.close()
        rounds.cancel()
        await asyncio.gather(rounds, opening, return_exceptions=True)
        await parts.evaluations.close()
