"""One stream of events for everybody who listens.

Always true:
- while somebody listens, the status is made once a second, and serialised once, however many listen; while nobody does,
  nothing is made;
- nothing is queued: a reader that is slow is sent the newest status when it is ready for it, and the names of all
  pictures that changed since what it was sent before;
- `stop` ends every stream, and so does a status that can't be made for another reason than a store that is away.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

from protocol.errors import UnavailableError

log = logging.getLogger(__name__)

INTERVAL_S = 1.0  # people read it; faster costs the loop and shows nothing more
RETRY_MS = 2000  # a browser that lost the service asks again after this
Make = Callable[[], Awaitable[str]]


class Broadcast:
    """Streams of one service. `make` gives the status as JSON, `changes` a number for each picture.

    `epoch` tells the events of one life of the service from those of the next.
    """

    def __init__(self, make: Make, changes: Callable[[], Mapping[str, int]], epoch: int = 0) -> None:
        self._make = make
        self._changes = changes
        self._epoch = epoch
        self._number = 0
        self._status = b""
        self._numbers: Mapping[str, int] = {}
        self._changed: dict[tuple[str, ...], bytes] = {}
        self._news = asyncio.Event()
        self._stopped = False
        self._maker: asyncio.Task[None] | None = None
        self.num_listening = 0

    @property
    def stopped(self) -> bool:
        """Streams have ended, and no new one begins."""
        return self._stopped

    def stop(self) -> None:
        """End every stream."""
        self._stopped = True
        self._wake()
        if self._maker is not None:
            self._maker.cancel()

    async def stream(self) -> AsyncGenerator[bytes]:
        """Events for one listener: the status at once and then once a second, and which pictures changed."""
        self.num_listening += 1
        if self._maker is None and not self._stopped:
            self._maker = asyncio.create_task(self._work(), name="events")
            self._maker.add_done_callback(self._ended)
        maker = self._maker
        sent, seen = 0, dict(self._changes())
        try:
            yield f"retry: {RETRY_MS}\n\n".encode()
            while not self._stopped and self._maker is maker:
                if sent == self._number:
                    await self._news.wait()
                    continue
                sent = self._number
                names = tuple(name for name, number in self._numbers.items() if seen.get(name) != number)
                seen = self._numbers
                yield self._status + self._changed_event(names)
        finally:
            self.num_listening -= 1
            if not self.num_listening and self._maker is not None:
                self._maker.cancel()
                self._maker = None

    def _ended(self, maker: "asyncio.Task[None]") -> None:
        """A status can't be made: streams end, so that who listens asks again and is told why."""
        if not maker.cancelled() and (error := maker.exception()):
            log.error("the events end: no status can be made", exc_info=error)
            self._maker = None
            self._wake()

    async def _work(self) -> None:
        while True:
            await self._tell()
            await asyncio.sleep(INTERVAL_S)

    async def _tell(self) -> None:
        try:
            kind, data = "status", await self._make()
        except UnavailableError as error:
            kind, data = "unavailable", json.dumps(str(error))
        self._number += 1
        self._numbers, self._changed = dict(self._changes()), {}
        self._status = f"id: {self._epoch}-{self._number}\nevent: {kind}\ndata: {data}\n\n".encode()
        self._wake()

    def _wake(self) -> None:
        """Whoever waits looks again, and waits for other news then: an event that stays set is a busy loop."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _changed_event(self, names: tuple[str, ...]) -> bytes:
        """The same bytes for all who miss the same."""
        if not names:
            return b""
        if names not in self._changed:
            self._changed[names] = f"event: changed\ndata: {json.dumps(names)}\n\n".encode()
        return self._changed[names]
