"""Redis in Cluster mode: all keys of a run lie in one slot, so one node at a time holds a run.

Always true: the cluster is only asked who holds the slot; what the buffer sends goes to that node as to a Redis of its
own, since transactions, WATCH and WAITAOF are a matter of one connection.
"""

from collections.abc import Callable
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException

from protocol.errors import SettingsError, UnavailableError

CONNECT_TIMEOUT_S = 5.0  # as for the nodes themselves


class ClusterNodes:
    """Finds the node of a key, through any node that was ever known."""

    def __init__(
        self,
        url: str,
        password: str | None,
        username: str | None,
        client: Callable[[str], Redis],
        tls: dict[str, Any] | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss") or not parts.hostname:
            raise SettingsError(f"buffer.cluster needs a redis:// or rediss:// address, not {parts.scheme}://")
        self._parts = parts
        self._password = password or (unquote(parts.password) if parts.password else None)
        self._username = username or (unquote(parts.username) if parts.username else None)
        self._make_client = client
        self._tls = tls if tls is not None and parts.scheme == "rediss" else {}
        self._known = {(parts.hostname, parts.port or 6379)}
        self._clients: dict[str, Redis] = {}

    async def find(self, key: str) -> Redis:
        """A client to the node that holds the key's slot."""
        topology = RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in sorted(self._known)],
            retry=Retry(NoBackoff(), 0),
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            ssl=self._parts.scheme == "rediss",
            require_full_coverage=False,
            username=self._username,
            password=self._password,
            **self._tls,
        )
        try:
            await topology.initialize()
            self._known |= {(str(node.host), int(node.port)) for node in topology.get_nodes()}
            node = topology.get_node_from_key(key)
        except RedisClusterException as error:
            raise UnavailableError(f"the Redis cluster doesn't answer ({error}): start it or wait") from error
        finally:
            await topology.aclose()
        if node is None:
            raise UnavailableError("no node of the Redis cluster holds the run's slot: assign all slots, or wait")
        url = self._address(str(node.host), int(node.port))
        if url not in self._clients:
            self._clients[url] = self._make_client(url)
        return self._clients[url]

    async def close(self) -> None:
        """Release the connections to all nodes."""
        for client in self._clients.values():
            await client.aclose(close_connection_pool=True)

    def _address(self, host: str, port: int) -> str:
        login = self._parts.netloc.rpartition("@")[0]
        host = f"[{quote(host, safe=':')}]" if ":" in host else host
        return self._parts._replace(netloc=f"{login}@{host}:{port}" if login else f"{host}:{port}").geturl()
