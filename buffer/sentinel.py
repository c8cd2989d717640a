"""A Redis whose master is named by Sentinels, and changes when it fails.

Always true: the Sentinels are only asked who the master is; what the buffer sends goes to that server as to a Redis of
its own. They are asked again after a call lost its connection or was refused by a server that is a replica now, so
while they elect, calls fail as those to a Redis that is away, and are waited for alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from protocol.errors import SettingsError

CONNECT_TIMEOUT_S = 1.0  # the other Sentinels answer while one does not: don't wait long for it


@dataclass(frozen=True, slots=True)
class SentinelNodes:
    """The Sentinels, the name under which they watch the master, and who logs in to them."""

    nodes: tuple[tuple[str, int], ...]
    master: str
    password: str | None = None
    username: str | None = None


class SentinelMaster:
    """Finds the master, through any Sentinel that answers."""

    def __init__(
        self, sentinels: SentinelNodes, url: str, client: Callable[[str], Redis], tls: dict[str, Any] | None = None
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss"):
            raise SettingsError(
                f"buffer.sentinel needs a redis:// or rediss:// address as buffer.url, not {parts.scheme}://: its host "
                "is not used, its scheme, login and database are"
            )
        self._parts = parts
        self._name = sentinels.master
        self._make_client = client
        self._clients: dict[str, Redis] = {}
        kwargs: dict[str, Any] = {"password": sentinels.password, "username": sentinels.username, "protocol": 2}
        kwargs |= {"socket_connect_timeout": CONNECT_TIMEOUT_S, "socket_timeout": CONNECT_TIMEOUT_S}
        kwargs |= {"retry": Retry(NoBackoff(), 0)}
        if parts.scheme == "rediss":
            kwargs |= {"ssl": True} | (tls or {})
        self._sentinel = Sentinel(list(sentinels.nodes), sentinel_kwargs=kwargs)

    async def find(self, key: str) -> Redis:
        """A client to the server that is master now. Raises RedisError while there is none."""
        host, port = await self._sentinel.discover_master(self._name)
        url = self._address(str(host), int(port))
        if url not in self._clients:
            self._clients[url] = self._make_client(url)
        return self._clients[url]

    async def close(self) -> None:
        """Release the connections to Sentinels and masters."""
        await self._sentinel.aclose()
        for client in self._clients.values():
            await client.aclose(close_connection_pool=True)

    def _address(self, host: str, port: int) -> str:
        login = self._parts.netloc.rpartition("@")[0]
        host = f"[{quote(host, safe=':')}]" if ":" in host else host
        return self._parts._replace(netloc=f"{login}@{host}:{port}" if login else f"{host}:{port}").geturl()
