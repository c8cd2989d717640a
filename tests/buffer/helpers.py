"""What the buffer's tests share: pieces, prompts, a checked wrapper, and whole runs as comparable values."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import redis

from buffer.epochs import Epochs
from buffer.interface import ContinuationBuffer, CursorMove, Limits, NewGroup, SampleLease
from buffer.memory import MemoryBuffer
from buffer.memory_store import MemoryStore
from buffer.redis_buffer import RedisBuffer
from protocol.samples import Group, Prompt, Reward, Sample, Segment
from protocol.states import FinishReason, GroupState, SampleState

READS = frozenset(
    {
        "snapshot",
        "open_samples",
        "open_groups",
        "samples",
        "groups",
        "batch_leases",
        "count_longer",
        "recount",
        "policies",
        "changes",
    }
)
LONG_S = 3600.0


def piece(start: int, num_tokens: int, version: int = 0, kv_kept: bool = False) -> Segment:
    """A piece whose tokens say where they stand."""
    tokens = np.arange(start, start + num_tokens, dtype=np.int32) * 10 + version
    return Segment(start, version, tokens, (tokens / np.float32(-1000)).astype(np.float32), kv_kept)


def prompt(n: int = 0) -> Prompt:
    return Prompt(f"source:{n}", (1, 2, 3 + n), f"prompt {n}", "source", {"answer": n}, {"level": [n]})


class Checked:
    """A buffer that is counted again after each call, whether it returned or raised."""

    def __init__(self, inner: ContinuationBuffer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if name in READS or name == "close":
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return await method(*args, **kwargs)
            finally:
                await check(self.inner)

        return call


async def check(buffer: ContinuationBuffer) -> None:
    """The ledger balances and the raw records agree with it."""
    snapshot, recount = await buffer.snapshot(), await buffer.recount()
    assert snapshot.ledger.error == 0
    assert recount.faults == (), recount.faults
    assert recount.stored == recount.counted == snapshot.ledger
    assert snapshot.pool.error == 0
    assert snapshot.pool.pooled == snapshot.samples[SampleState.POOLED]


@dataclass
class Rig:
    """One run: the services on it, and its stored bytes."""

    connect: Callable[..., Any]
    fingerprint: Callable[[], dict[Any, Any]]
    kind: str
    url: str = ""

    async def service(self, limits: Limits | None = None) -> Any:
        """One more service object on the same run, not yet claimed, checked after each call."""
        return Checked(await self.connect(limits))


def memory_rig(now_ms: Callable[[], int] | None = None) -> Rig:
    store = MemoryStore(now_ms) if now_ms else MemoryStore()

    async def connect(limits: Limits | None = None) -> MemoryBuffer:
        return MemoryBuffer(store, limits)

    def fingerprint() -> dict[Any, Any]:
        return {name: repr(value) for name, value in vars(store).items() if name not in ("counters", "now_ms")}

    return Rig(connect, fingerprint, "memory")


def redis_rig(url: str, namespace: str | None = None, **given: Any) -> Rig:
    """A run of its own on a server that others use too."""
    namespace = namespace or f"test-{uuid.uuid4().hex[:12]}"

    async def connect(limits: Limits | None = None) -> RedisBuffer:
        return await RedisBuffer.connect(url, namespace=namespace, run="run", max_connections=4, limits=limits, **given)

    def fingerprint() -> dict[Any, Any]:
        with redis.Redis.from_url(url) as client:
            keys = sorted(client.scan_iter(match=f"{{{namespace}:run}}:*", count=1000))
            return {key: client.dump(key) for key in keys if not key.endswith(b":counters")}

    return Rig(connect, fingerprint, "redis", url)


class Known:
    """An `EpochKeeper` that knows some epochs from before, and what it was told since."""

    def __init__(self, service: int, trainer: int) -> None:
        self.known = Epochs(service, trainer)
        self.told: list[Epochs] = []

    def read(self) -> Epochs:
        return self.known

    def raise_to(self, epochs: Epochs) -> None:
        self.told.append(epochs)


async def admit(buffer: Any, num_groups: int = 1, num_samples: int = 2, version: int = 0) -> list[Group]:
    """Admit groups at the cursor, which moves on by as many prompts."""
    before = (await buffer.snapshot()).cursor
    start = int(before or 0)
    new = [NewGroup(prompt(start + n), num_samples) for n in range(num_groups)]
    return await buffer.admit(new, version, CursorMove(before, str(start + num_groups)))


async def start_one(buffer: Any, sample_id: str, worker: str = "w") -> SampleLease:
    (lease,) = await buffer.start([sample_id], worker, LONG_S)
    return lease


async def finish_group(buffer: Any, group: Group, version: int = 0, num_tokens: int = 4) -> GroupState:
    """Generate and score all samples of a group."""
    state = GroupState.OPEN
    for sample in group.samples:
        lease = await start_one(buffer, sample.sample_id)
        await buffer.finish(lease, piece(0, num_tokens, version), FinishReason.STOP)
        state = await buffer.score(sample.sample_id, Reward(1.0, {"right": 1.0}), 1)
    return state


async def leased_run(buffer: Any, num_steps: int, size: int = 1) -> tuple[int, list[Group]]:
    """Open a trainer, and lease one batch of `size` groups for each step; epoch and groups in order."""
    opened = await buffer.open_trainer(0)
    groups = await admit(buffer, num_steps * size)
    for group in groups:
        assert await finish_group(buffer, group) is GroupState.READY
    for step in range(1, num_steps + 1):
        assert await buffer.offer(size)
        assert await buffer.lease_batch(step, opened.trainer_epoch, size) is not None
    return opened.trainer_epoch, groups


def plain(value: Any) -> Any:
    """Anything that a buffer returns, as values that compare."""
    match value:
        case Segment():
            return (value.start, value.version, value.kv_kept, value.tokens.tolist(), value.logprobs.tobytes())
        case Sample() | Group():
            names = list(type(value).__dataclass_fields__)
            return {name: plain(getattr(value, name)) for name in names}
        case list() | tuple():
            return [plain(v) for v in value]
        case _:
            return value
