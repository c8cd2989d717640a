"""A whole service in one event loop: in-memory buffer, simulated engine, a scorer that takes no time."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from safetensors.numpy import save_file

from buffer.interface import ContinuationBuffer
from buffer.memory import MemoryBuffer
from protocol.batch import MEDIA_TYPE, Batch, decode_batch
from protocol.manifest import write_manifest
from protocol.messages import TRAINER_EPOCH_HEADER
from protocol.samples import Prompt, Reward
from protocol.settings import RunSettings
from protocol.states import FailReason
from rollout_service.app.build import build_app
from rollout_service.app.host import Host
from rollout_service.engines.pool import EnginePool
from rollout_service.engines.simulated import SimulatedEngine
from rollout_service.events import Mailbox
from rollout_service.parts import ServiceParts, assemble_parts
from rollout_service.prompts.interface import PromptSet
from rollout_service.rewards.interface import ScoringError, ScoringTask
from rollout_service.samples import SampleParts
from rollout_service.tuning.trace_recorder import TraceRecorder


class QuickScorer:
    """Rewards from the sample's id; fails those that it is told to."""

    def __init__(self) -> None:
        self.fails: Callable[[ScoringTask], bool] = lambda task: False
        self.scored: list[str] = []

    async def start(self) -> None: ...

    async def score(self, task: ScoringTask) -> Reward:
        if self.fails(task):
            raise ScoringError(FailReason.REWARD_ERROR, "told to fail")
        self.scored.append(task.sample_id)
        return Reward(float(hashlib.blake2b(task.sample_id.encode(), digest_size=1).digest()[0] % 2))

    async def close(self) -> None: ...


def service_settings(tmp_path: Path, **changes) -> RunSettings:
    """Small and quick; `changes` are whole sections."""
    sections = {
        "run": {"name": "test", "dir": str(tmp_path)},
        "data": {"train_batch_size": 4, "max_prompt_length": 8, "max_response_length": 64},
        "rollout": {"n": 2, "ratio": 2.0, "lookahead": 1, "checkpoint_interval_s": 0.01},
        "engine": {
            "backend": "simulated",
            "max_num_seqs": 32,
            "simulated": {"median_tokens": 12, "step_base_s": 0.0005, "step_per_sequence_s": 0.0},
        },
    }
    for name, values in changes.items():
        sections[name] = sections.get(name, {}) | values
    return RunSettings(**sections)


@dataclass
class TestService:
    """A running service and a client of it."""

    __test__ = False
    client: httpx.AsyncClient
    parts: ServiceParts
    host: Host
    engines: list[SimulatedEngine]
    scorer: QuickScorer
    loop_task: asyncio.Task[None]

    async def open_trainer(self, durable_step: int = 0) -> dict[str, str]:
        """Headers of a new session."""
        response = await self.client.post("/v1/trainers", json={"durable_step": durable_step})
        session = response.raise_for_status().json()
        return {TRAINER_EPOCH_HEADER: str(session["trainer_epoch"]), "Accept": MEDIA_TYPE}

    async def batch(self, step: int, headers: dict[str, str]) -> Batch:
        """The batch of a step, waiting for it."""
        response = await self.client.post("/v1/batches", json={"step": step, "wait_s": 30}, headers=headers)
        assert response.status_code == 200, response.text
        return decode_batch(response.content)

    def write_weights(self, step: int) -> str:
        """A published folder, as a path under the weights root."""
        folder = self.parts.settings.weights_root / f"step-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"x": np.full(3, step, np.float32)}, folder / "model.safetensors")
        write_manifest(folder, step)
        return folder.name

    async def publish(self, step: int, headers: dict[str, str]) -> int:
        """Publish weights after a step; the version."""
        body = {"step": step, "path": self.write_weights(step)}
        response = await self.client.post("/v1/policies", json=body, headers=headers)
        assert response.status_code == 202, response.text
        return response.json()["version"]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the service run until `condition` holds; pytest's timeout bounds it."""
        while not condition():
            await asyncio.sleep(0.001)
            if self.loop_task.done():
                self.loop_task.result()


@asynccontextmanager
async def running_service(
    settings: RunSettings,
    buffer: ContinuationBuffer | None = None,
    lengths: Callable[[str], int] | None = None,
    trace: TraceRecorder | None = None,
    text: Callable[[int], str] = "prompt {}".format,
) -> AsyncIterator[TestService]:
    """Start the parts and the round loop; close them in order."""
    buffer = buffer or MemoryBuffer()
    service_epoch = await buffer.claim_service("test")
    scorer = QuickScorer()
    engines = [SimulatedEngine(settings, f"engine-{i}", lengths) for i in range(settings.engine.num_replicas)]
    pool = EnginePool(engines)
    await pool.start()
    sample_parts = SampleParts(
        owner="test",
        settings=settings,
        buffer=buffer,
        pool=pool,
        scorer=scorer,
        mailbox=Mailbox(),
        decode=lambda tokens: " ".join(map(str, tokens)),
        stop_token_ids=frozenset({0}),
        trace=trace or TraceRecorder(),
    )
    prompts = PromptSet(
        train=tuple(Prompt(f"p:{i}", (1, 2, 3 + i), text(i), "test", i) for i in range(1000)),
        validation=tuple(Prompt(f"v:{i}", (9, 9, i), f"held-out {i}", "test", i) for i in range(10)),
        num_filtered=0,
    )
    parts = assemble_parts(settings, sample_parts, None, prompts, service_epoch)
    await parts.policies.restore()
    host = Host(settings)
    host.started(parts)
    loop_task = asyncio.create_task(parts.loop.run())
    transport = httpx.ASGITransport(build_app(host), raise_app_exceptions=False)
    token = settings.service.token
    auth = {"Authorization": f"Bearer {token.get_secret_value()}"} if token else {}
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=auth) as client:
            yield TestService(client, parts, host, engines, scorer, loop_task)
    finally:
        loop_task.cancel()
        await asyncio.gather(loop_task, return_exceptions=True)
        await parts.evaluations.close()
        await parts.loop.close()
        await pool.close()
