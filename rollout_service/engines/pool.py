"""The replicas of one service as one engine.

Always true:
- a request is on one replica, and its abort goes there; a slot is taken from the moment a request is assigned;
- a switch of weights is whole or did not happen: all living replicas are held, all install, then all go on; if one of
  them fails, those that had changed go back before any of them writes a token;
- `version` is what every living replica has; a replica that died comes back with exactly that.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path

from protocol.errors import EngineDeadError, EngineError, WeightsError
from protocol.settings.rollout import EngineBackend
from protocol.settings.run import RunSettings
from rollout_service.engines.interface import Chunk, EngineStats, GenerationRequest
from rollout_service.engines.replica import Replica

log = logging.getLogger(__name__)


class EnginePool:
    """One to k replicas."""

    def __init__(self, engines: Sequence[Replica]) -> None:
        if not engines:
            raise EngineError("a pool needs at least one engine; set engine.num_replicas to 1 or more")
        self._engines = {engine.worker: engine for engine in engines}
        if len(self._engines) != len(engines):
            raise EngineError("two engines of the pool have the same worker id; give each its own")
        self._assigned: dict[str, str] = {}
        self._loads: dict[str, int] = dict.fromkeys(self._engines, 0)
        self._changing = asyncio.Lock()
        self._path: Path | None = None
        self._version = 0

    @property
    def workers(self) -> list[str]:
        """Ids of the replicas."""
        return list(self._engines)

    @property
    def version(self) -> int:
        """Version that every living replica has."""
        return self._version

    @property
    def takes_seeds(self) -> bool:
        """Whether requests may carry a seed, on every replica."""
        return all(engine.takes_seeds for engine in self._engines.values())

    @property
    def slots(self) -> int:
        """Sequences that the living replicas decode at once."""
        return sum(engine.slots for engine in self._living())

    @property
    def free_slots(self) -> int:
        """Slots that no request is assigned to."""
        return sum(max(0, engine.slots - self._loads[engine.worker]) for engine in self._living())

    def stats(self) -> list[EngineStats]:
        """State of every replica, without waiting."""
        return [engine.stats() for engine in self._engines.values()]

    def _living(self) -> list[Replica]:
        return [engine for engine in self._engines.values() if engine.stats().alive]

    # Life

    async def start(self) -> None:
        """Start every replica, or none: if one fails the others are closed and its error is raised."""
        results = await self._on_all(list(self._engines.values()), lambda engine: engine.start())
        if failed := _errors(results):
            await self.close()
            raise next(iter(failed.values()))

    async def restart_dead(self) -> list[str]:
        """Restart every dead replica with the active weights; their ids. Raises `EngineError` if one can't."""
        async with self._changing:
            dead = [engine for engine in self._engines.values() if not engine.stats().alive]
            _raise_first(await self._on_all(dead, lambda engine: engine.restart(self._path, self._version)))
            return [engine.worker for engine in dead]

    async def kill(self, worker: str) -> None:
        """End a replica that hangs; its streams end with `EngineDeadError`, and `restart_dead` brings it back."""
        await self._engines[worker].close()

    async def close(self) -> None:
        """Stop every replica and its processes; idempotent."""
        failed = _errors(await self._on_all(list(self._engines.values()), lambda engine: engine.close()))
        for worker, error in failed.items():
            log.warning("engine %s did not close in order: %s", worker, error)

    # Generation

    def assign(self, request_id: str) -> str:
        """Take a slot for a request on the replica with the most free ones; the replica's id.

        The slot is free again when the request's stream ends, or by `unassign`. Raises `EngineDeadError` if no replica
        lives. With no slot free the least loaded replica queues it.
        """
        living = self._living()
        if not living:
            raise EngineDeadError("no engine of the pool is alive; restart them")
        if request_id in self._assigned:
            raise EngineError(f"request {request_id} is assigned already; every attempt needs an id of its own")
        best = max(living, key=lambda engine: engine.slots - self._loads[engine.worker])
        self._assigned[request_id] = best.worker
        self._loads[best.worker] += 1
        return best.worker

    def unassign(self, request_id: str) -> None:
        """Free the slot of a request that will not be generated after all; idempotent."""
        worker = self._assigned.pop(request_id, None)
        if worker is not None:
            self._loads[worker] -= 1

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Stream the response to one request, on the replica that it was assigned to (or is now)."""
        worker = self._assigned.get(request.request_id) or self.assign(request.request_id)
        try:
            async with aclosing(self._engines[worker].generate(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self.unassign(request.request_id)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests where they are; one that is not assigned yet is aborted wherever it comes."""
        for engine in self._engines.values():
            mine = [i for i in request_ids if self._assigned.get(i, engine.worker) == engine.worker]
            if mine:
                await engine.abort(mine)

    async def wait_idle(self) -> None:
        """Return when no request runs on any replica."""
        await asyncio.gather(*(engine.wait_idle() for engine in self._engines.values()))

    # Weights

    async def install(self, path: Path, version: int) -> None:
        """Install published weights on every living replica, or on none.

        Raises the first failure (`WeightsError` or `EngineError`) with the replica's name; every replica then has the
        version it had. Dead replicas are left out: `restart_dead` brings them back with the active weights.
        """
        async with self._changing:
            living = self._living()
            if not living:
                raise EngineDeadError("no engine of the pool is alive; restart them before an install")
            _raise_first(await self._on_all(living, lambda engine: engine.prepare(path)))
            held = await self._on_all(living, lambda engine: engine.hold())
            try:
                _raise_first(held)
                installed = await self._on_all(living, lambda engine: engine.install(path, version))
                if failed := _errors(installed):
                    await self._revert([engine for engine in living if engine.worker not in failed])
                _raise_first(installed)
                self._path, self._version = path, version
            finally:
                holding = [engine for engine in living if held[engine.worker] is None]
                await self._on_all(holding, lambda engine: engine.release())

    async def _revert(self, engines: list[Replica]) -> None:
        failed = _errors(await self._on_all(engines, lambda engine: engine.revert()))
        for worker, error in failed.items():
            log.error("engine %s could not go back to version %d and is closed: %s", worker, self._version, error)
            await self._engines[worker].close()

    async def _on_all(
        self, engines: list[Replica], action: Callable[[Replica], Awaitable[None]]
    ) -> dict[str, Exception | None]:
        """Do it on all of them at once; what each raised, by worker."""

        async def attempt(engine: Replica) -> Exception | None:
            try:
                await action(engine)
            except Exception as error:
                return error
            return None

        results = await asyncio.gather(*(attempt(engine) for engine in engines))
        return {engine.worker: result for engine, result in zip(engines, results, strict=True)}


def build_pool(settings: RunSettings) -> EnginePool:
    """The pool that `engine.backend` and `engine.num_replicas` ask for, not started."""
    workers = [f"engine-{index}" for index in range(settings.engine.num_replicas)]
    return EnginePool([_build_engine(settings, worker) for worker in workers])


def _build_engine(settings: RunSettings, worker: str) -> Replica:
    match settings.engine.backend:
        case EngineBackend.LOCAL:
            from rollout_service.engines.vllm_engine import VllmEngine

            return VllmEngine(settings, worker)
        case EngineBackend.RAY:
            from rollout_service.engines.ray_engine import RayEngine

            return RayEngine(settings, worker)
        case EngineBackend.SIMULATED:
            from rollout_service.engines.simulated import SimulatedEngine

            return SimulatedEngine(settings, worker)


def _errors(results: dict[str, Exception | None]) -> dict[str, Exception]:
    return {worker: error for worker, error in results.items() if error is not None}


def _raise_first(results: dict[str, Exception | None]) -> None:
    """Raise what failed with the names of the replicas: `WeightsError` if the weights are at fault on all of them."""
    if failed := _errors(results):
        kind = WeightsError if all(isinstance(error, WeightsError) for error in failed.values()) else EngineError
        raise kind(_named(failed)) from next(iter(failed.values()))


def _named(failed: dict[str, Exception]) -> str:
    return "; ".join(f"engine {worker}: {error}" for worker, error in failed.items())
