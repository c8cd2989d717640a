"""The streams of one replica: who runs, who is to be aborted, and whether anybody is left.

Always true:
- a request id is open at most once at a time;
- an abort is remembered until its stream opens: one that comes before its request is not lost;
- `wait_idle` returns only while no stream is open.
"""

import asyncio
from collections import OrderedDict
from typing import Generic, TypeVar

from protocol.errors import EngineError

# Ids are unique for each attempt, so an old entry can only be one whose stream never came: the oldest go first.
MAX_EARLY_ABORTS = 65_536

S = TypeVar("S")


class StreamTable(Generic[S]):
    """Open streams by request id, each with what its engine keeps for it."""

    def __init__(self) -> None:
        self._streams: dict[str, S] = {}
        self._early_aborts: OrderedDict[str, None] = OrderedDict()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._streams

    def open(self, request_id: str, stream: S) -> bool:
        """Add a stream; whether it was aborted before it came. Raises `EngineError` if the id is open."""
        if request_id in self._streams:
            raise EngineError(f"request {request_id} runs already; every attempt needs an id of its own")
        self._streams[request_id] = stream
        self._idle.clear()
        return self._early_aborts.pop(request_id, self) is None

    def close(self, request_id: str) -> None:
        """Remove a stream that ended."""
        self._streams.pop(request_id, None)
        if not self._streams:
            self._idle.set()

    def get(self, request_id: str) -> S | None:
        """The open stream of this id."""
        return self._streams.get(request_id)

    def remember_abort(self, request_id: str) -> None:
        """Abort the stream of this id as soon as it opens."""
        self._early_aborts[request_id] = None
        if len(self._early_aborts) > MAX_EARLY_ABORTS:
            self._early_aborts.popitem(last=False)

    def values(self) -> list[S]:
        """All open streams."""
        return list(self._streams.values())

    async def wait_idle(self) -> None:
        """Return when no stream is open."""
        await self._idle.wait()
