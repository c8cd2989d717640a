"""A VllmEngine in a Ray actor, as one replica of this service.

Always true:
- one task takes what the actor wrote and hands it to the streams; if the actor is gone, every stream ends with
  `EngineDeadError`;
- an abort that comes before its request was submitted is remembered here, a later one by the engine in the actor;
- stats are those of the actor's last delivery, with the number of streams that are open here.
"""

import asyncio
import os
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import protocol.errors
from protocol.errors import EngineDeadError, EngineError, SettingsError
from protocol.settings.load import dump_settings
from protocol.settings.run import RunSettings
from rollout_service.engines.interface import Chunk, EngineStats, GenerationRequest, StreamEnd
from rollout_service.engines.streams import StreamTable
from rollout_service.engines.vllm_arguments import num_usable_cores
from rollout_service.engines.vllm_outputs import empty_chunk

TAKE_WAIT_S = 1.0  # how old the stats of an actor that has nothing to say may be
CLOSE_TIMEOUT_S = 30.0  # the engine in the actor needs a few seconds to end its core
MAX_CALLS = 1000  # concurrent calls of an async actor: takes, aborts and control beside each other


@dataclass(slots=True)
class _Stream:
    items: deque[Chunk] = field(default_factory=deque[Chunk])
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    error: EngineError | None = None
    submitted: bool = False
    aborted: bool = False


class RayEngine:
    """One replica in a Ray actor; joins the Ray that runs (RAY_ADDRESS), else starts one on this machine."""

    def __init__(self, settings: RunSettings, worker: str) -> None:
        self._settings = settings
        self._worker = worker
        self._actor: Any = None
        self._taker: asyncio.Task[None] | None = None
        self._streams = StreamTable[_Stream]()
        self._takes_seeds = False
        self._epoch = 0
        self._num_restarts = 0
        self._tokens_generated = 0
        self._stats: EngineStats | None = None

    @property
    def worker(self) -> str:
        """Id of this replica, unique within the service."""
        return self._worker

    @property
    def slots(self) -> int:
        """Sequences that it decodes at once."""
        return self._settings.engine.max_num_seqs

    @property
    def takes_seeds(self) -> bool:
        """Whether requests may carry a seed."""
        return self._takes_seeds

    def stats(self) -> EngineStats:
        """State of this replica, without waiting."""
        last = self._stats
        return EngineStats(
            worker=self._worker,
            epoch=self._epoch,
            slots=self.slots,
            num_running=len(self._streams),
            version=last.version if last is not None else 0,
            alive=self._actor is not None and last is not None and last.alive,
            tokens_generated=self._tokens_generated,
            num_restarts=self._num_restarts,
        )

    async def process_ids(self) -> list[int]:
        """Ids of the engine's core processes, on the machine of the actor."""
        return await self._ask("process_ids")

    # Life

    async def start(self) -> None:
        """Load the model as it starts (version 0). Raises EngineError with what to do."""
        await self._begin("start")

    async def restart(self, path: Path | None, version: int) -> None:
        """After the engine or its actor died: a new actor with the weights of `version`."""
        await self.close()
        await self._begin("restart", path, version)
        self._num_restarts += 1

    async def _begin(self, method: str, *arguments: Any) -> None:
        self._actor = await asyncio.to_thread(_create_actor, self._settings, self._worker)
        try:
            await self._call("start")
            if method != "start" and arguments[0] is not None:
                await self._call("install", *arguments)
            self._takes_seeds = await self._ask("takes_seeds")
            self._stats = (await self._ask("take", 0.0)).stats
        except BaseException:
            await self.close()
            raise
        self._epoch += 1
        self._taker = asyncio.create_task(self._take_forever(self._actor), name=f"ray-engine-{self._worker}")

    async def close(self) -> None:
        """Stop the actor and the engine in it; streams that are open end with `EngineDeadError`."""
        actor, self._actor = self._actor, None
        taker, self._taker = self._taker, None
        if taker is not None:
            taker.cancel()
        self._fail_streams()
        if actor is not None:
            await asyncio.to_thread(_kill_actor, actor)

    def _fail_streams(self) -> None:
        for stream in self._streams.values():
            stream.error = stream.error or self._death()
            stream.ready.set()

    def _death(self) -> EngineDeadError:
        return EngineDeadError(f"the actor of engine {self._worker} is gone; restart it with the active weights")

    # Calls

    async def _ask(self, method: str, *arguments: Any) -> Any:
        import ray.exceptions

        if self._actor is None:
            raise EngineDeadError(f"engine {self._worker} does not run; start or restart it first")
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except ray.exceptions.RayActorError as error:
            raise self._death() from error
        except ray.exceptions.RayTaskError as error:
            raise EngineError(f"engine {self._worker} failed in its actor: {error.cause}") from error

    async def _call(self, method: str, *arguments: Any) -> None:
        failed = await self._ask("call", method, *arguments)
        if failed is not None:
            raise _error(*failed)

    async def _take_forever(self, actor: Any) -> None:
        while True:
            try:
                delivery = await self._ask("take", TAKE_WAIT_S)
            except EngineError:
                if self._actor is actor:
                    self._actor = None
                self._fail_streams()
                return
            self._stats = delivery.stats
            for item in delivery.items:
                self._hand_over(item)

    def _hand_over(self, item: Any) -> None:
        stream = self._streams.get(item.request_id)
        if stream is None:
            return
        if item.chunk is not None:
            self._tokens_generated += len(item.chunk.tokens)
            stream.items.append(item.chunk)
        else:
            stream.error = _error(*item.error)
        stream.ready.set()

    # Generation

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Stream the response to one request."""
        stream = _Stream()
        if self._streams.open(request.request_id, stream):
            self._streams.close(request.request_id)
            yield empty_chunk(self.stats().version, StreamEnd.ABORT)
            return
        ended = False
        try:
            stream.submitted = True  # from here on the engine in the actor remembers an abort
            await self._ask("submit", [request])
            while not ended:
                await stream.ready.wait()
                stream.ready.clear()
                while stream.items and not ended:
                    chunk = stream.items.popleft()
                    ended = chunk.end is not None
                    yield chunk
                if not ended and stream.error is not None:
                    raise stream.error
        finally:
            self._streams.close(request.request_id)
            if not ended and stream.error is None and self._actor is not None:
                await self._ask("drop", request.request_id)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; their streams deliver what there is and end with `abort`."""
        for request_id in request_ids:
            if request_id not in self._streams:
                self._streams.remember_abort(request_id)
        known = [request_id for request_id in request_ids if request_id in self._streams]
        if known and self.stats().alive:
            await self._call("abort", known)

    async def wait_idle(self) -> None:
        """Return when no request runs."""
        await self._streams.wait_idle()

    # Weights

    async def prepare(self, path: Path) -> None:
        """Check the weights in `path` where the actor runs, before anything is held. Raises WeightsError."""
        await self._call("prepare", path)

    async def hold(self) -> None:
        """Write no token until `release`; holds nest."""
        await self._call("hold")

    async def release(self) -> None:
        """Undo one `hold`."""
        await self._call("release")

    async def install(self, path: Path, version: int) -> None:
        """Load the weights in `path` and become `version`. Raises WeightsError or EngineError."""
        await self._change("install", path, version)

    async def revert(self) -> None:
        """Put back the weights and the version from before the last install. Raises `EngineError`."""
        await self._change("revert")

    async def _change(self, method: str, *arguments: Any) -> None:
        await self._call(method, *arguments)
        fresh: EngineStats = await self._ask("stats")
        self._stats = replace(self._stats, version=fresh.version) if self._stats is not None else fresh


def _create_actor(settings: RunSettings, worker: str) -> Any:
    """A new actor; starts Ray on this machine if none is joined. Raises `SettingsError` without Ray."""
    if find_spec("ray") is None:
        raise SettingsError("engine.backend = 'ray' needs Ray, which is not installed: install april-rollout[ray]")
    import ray

    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS")
        local: dict[str, Any] = {} if address else {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        ray.init(address=address, log_to_driver=False, configure_logging=False, **local)
    from rollout_service.engines.ray_actor import EngineActor

    num_gpus = settings.engine.tensor_model_parallel_size if ray.cluster_resources().get("GPU", 0) else 0
    # Ray sets OMP_NUM_THREADS to the actor's CPUs, one by default, which is not what the engine is to use.
    environment = {"OMP_NUM_THREADS": str(settings.engine.num_threads or num_usable_cores())}
    remote: Any = ray.remote(EngineActor)
    options = {"num_cpus": 1, "num_gpus": num_gpus, "max_concurrency": MAX_CALLS, "max_restarts": 0}
    return remote.options(**options, runtime_env={"env_vars": environment}).remote(dump_settings(settings), worker)


def _kill_actor(actor: Any) -> None:
    import ray
    import ray.exceptions

    with suppress(ray.exceptions.RayError):  # a dead actor, or one that does not end in time: it is killed anyway
        ray.get(actor.call.remote("close"), timeout=CLOSE_TIMEOUT_S)
    ray.kill(actor)


def _error(name: str, sentence: str) -> EngineError:
    kind = getattr(protocol.errors, name, EngineError)
    return kind(sentence)
