"""Runs inside a Ray actor: a VllmEngine, and one outbox for the chunks of all its streams.

Always true: a chunk is taken from the outbox once and in the order of its stream; a stream's last item is its end or
its error. One outbox instead of a Ray stream for each request: Ray's cost is per object, and a replica writes thousands
of chunks a second.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from protocol.errors import AprilError, EngineError
from protocol.settings.run import RunSettings
from rollout_service.engines.interface import Chunk, EngineStats, GenerationRequest
from rollout_service.engines.vllm_engine import VllmEngine


@dataclass(frozen=True, slots=True)
class Item:
    """One chunk of a stream, or the error that ended it (by class name and sentence)."""

    request_id: str
    chunk: Chunk | None = None
    error: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """What the actor had to say since the last time, with its state at that moment."""

    items: list[Item]
    stats: EngineStats


class EngineActor:
    """The engine's methods for Ray; errors travel as (class name, sentence), since Ray wraps what is raised."""

    def __init__(self, settings: dict[str, Any], worker: str) -> None:
        self._engine = VllmEngine(RunSettings(**settings), worker)
        self._outbox: list[Item] = []
        self._filled = asyncio.Event()
        self._streams: dict[str, asyncio.Task[None]] = {}

    async def call(self, method: str, *arguments: Any) -> tuple[str, str] | None:
        """Call one of the engine's methods that return nothing; its error, if it raised one."""
        try:
            await getattr(self._engine, method)(*arguments)
        except AprilError as error:
            return type(error).__name__, str(error)
        return None

    async def stats(self) -> EngineStats:
        """State of the engine."""
        return self._engine.stats()

    async def takes_seeds(self) -> bool:
        """Whether requests may carry a seed."""
        return self._engine.takes_seeds

    async def process_ids(self) -> list[int]:
        """Ids of the engine's core processes."""
        return self._engine.process_ids

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Start streams; their chunks come by `take`."""
        for request in requests:
            self._streams[request.request_id] = asyncio.create_task(self._pump(request))

    async def drop(self, request_id: str) -> None:
        """Nobody reads this stream any more: end it."""
        if task := self._streams.get(request_id):
            task.cancel()

    async def take(self, wait_s: float) -> Delivery:
        """Everything in the outbox; waits up to `wait_s` for the first item."""
        if not self._outbox:
            self._filled.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._filled.wait()
            except TimeoutError:
                return Delivery([], self._engine.stats())
        items, self._outbox = self._outbox, []
        return Delivery(items, self._engine.stats())

    async def _pump(self, request: GenerationRequest) -> None:
        try:
            async for chunk in self._engine.generate(request):
                self._put(Item(request.request_id, chunk))
        except AprilError as error:
            self._put(Item(request.request_id, error=(type(error).__name__, str(error))))
        except Exception as error:
            self._put(Item(request.request_id, error=(EngineError.__name__, f"the engine failed: {error}")))
        finally:
            del self._streams[request.request_id]

    def _put(self, item: Item) -> None:
        self._outbox.append(item)
        self._filled.set()
