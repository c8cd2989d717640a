"""The way to the Redis that holds a run, shared by all views of one buffer.

Always true: nothing is sent twice from here; the node is looked up again after it was found to be the wrong one, a
replica, or out of reach, and every node's client is kept until the link is closed, so that no call loses its own under
way.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from redis.asyncio import Redis
from redis.exceptions import ConnectionError, MovedError, ReadOnlyError, TimeoutError

from buffer.epochs import EpochKeeper, Epochs
from buffer.keys import Keys
from buffer.patience import Outage

MAX_MOVES = 5  # a slot moves once at a time; more is a cluster that disagrees with itself

T = TypeVar("T")


class Finder(Protocol):
    """Finds the node of a cluster that holds a key."""

    async def find(self, key: str) -> Redis:
        """A client to that node. Raises RedisError or OSError."""
        ...

    async def close(self) -> None:
        """Release all clients."""
        ...


class SingleServer:
    """A Redis that isn't a cluster."""

    def __init__(self, client: Redis) -> None:
        self._client = client

    async def find(self, key: str) -> Redis:
        """The one client."""
        return self._client

    async def close(self) -> None:
        """Release its connections."""
        await self._client.aclose(close_connection_pool=True)


class Link:
    """Client, keys and service epoch of a run; who keeps its epochs elsewhere, and who waits for Redis."""

    def __init__(self, finder: Finder, keys: Keys) -> None:
        self.keys = keys
        self.run_keys = [key.encode() for key in keys.of_run()]  # every script is sent them: encoded once
        self.service_epoch = 0
        self.epochs: EpochKeeper | None = None
        self.wait_aof = False
        self.wait_replicas = 0  # that must have it in their AOF, too
        self.outage = Outage()
        self._finder = finder
        self._client: Redis | None = None

    async def use(self, send: Callable[[Redis], Awaitable[T]]) -> T:
        """What `send` makes of the client of the run's node; raises what redis-py raises."""
        moved = None
        for _ in range(MAX_MOVES):
            client = self._client
            try:
                if client is None:
                    client = self._client = await self._finder.find(self.keys.prefix)
                return await send(client)
            except MovedError as error:
                self._forget(client)
                moved = error
            except (ConnectionError, TimeoutError, OSError, ReadOnlyError):  # the last: a replica now
                self._forget(client)
                raise
        assert moved is not None, "only a move begins the loop again"
        raise moved

    async def keep_epochs(self, epochs: Epochs) -> None:
        """Tell whoever keeps the highest epochs outside of Redis, if somebody does."""
        if self.epochs is not None:
            await asyncio.to_thread(self.epochs.raise_to, epochs)

    async def close(self) -> None:
        """Release all connections."""
        await self._finder.close()

    def _forget(self, client: Redis | None) -> None:
        if self._client is client:
            self._client = None
