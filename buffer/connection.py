"""Connecting to Redis, and whether it can keep the buffer's promises."""

import json
import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from buffer.cluster import ClusterNodes
from buffer.keys import Keys
from buffer.link import Finder, Link, SingleServer
from buffer.scripts import WITHDRAWN, Store
from buffer.sentinel import SentinelMaster, SentinelNodes
from protocol.errors import NotFoundError, RedisUnfitError, SettingsError, UnavailableError

SCHEMA_VERSION = 3  # of keys and bytes; raised by every change that an older release could not read
TAKEN_OVER = 2  # a run of this schema is one of the newest without pooled samples: opening it makes it that
MIN_REDIS_VERSION = (7, 0)  # the first whose scripts carry flags: what drains the buffer works when memory is full
CONNECT_TIMEOUT_S = 5.0  # a Redis that does not accept within this is away
ANSWER_TIMEOUT_S = 10.0  # longer than any transition by two orders; shorter than a lease, so a dead peer costs none
HEALTH_CHECK_S = 15.0  # a connection that was idle for longer is pinged before it is used
EARLY_S = 0.5  # two syncs of `everysec` can't begin within less than a second
POOL_TIMEOUT_S = 60.0  # waiting for a free connection is back-pressure, not a fault

_LOG = logging.getLogger(__name__)
POLICY_0 = json.dumps({"step": 0, "trainer_epoch": 0, "path": ""})


def open_client(
    url: str,
    password: str | None,
    username: str | None,
    max_connections: int,
    tls: Mapping[str, str] | None = None,
) -> Redis:
    """A client that never sends a command twice by itself: only the caller knows what may be repeated."""
    given: dict[str, Any] = {"password": password, "username": username}
    if url.startswith("rediss"):
        given |= tls or {}
    if not url.startswith("unix"):
        given["socket_keepalive"] = True
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=POOL_TIMEOUT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=ANSWER_TIMEOUT_S,
            health_check_interval=HEALTH_CHECK_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **{name: value for name, value in given.items() if value is not None},
        )
    except ValueError as error:
        raise SettingsError(
            f"buffer.url = {shown(url)} is no Redis address ({error}): use redis://, rediss:// or unix://"
        ) from error
    return Redis(connection_pool=pool)


def open_link(
    url: str,
    password: str | None,
    username: str | None,
    max_connections: int,
    cluster: bool,
    keys: Keys,
    sentinel: SentinelNodes | None = None,
    tls: Mapping[str, str] | None = None,
) -> Link:
    """The way to the run's Redis; nothing is connected yet. Raises SettingsError for an address that can't be used.

    `tls`: files by redis-py's names (`ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`), used with rediss:// addresses.
    """
    files = dict(tls or {})
    for name, path in files.items():
        if not Path(path).is_file():
            raise SettingsError(f"buffer.{name} = {path} is not a file: correct the path, or leave it off")

    def client(address: str) -> Redis:
        return open_client(address, password, username, max_connections, files)

    finder: Finder
    if sentinel is not None:
        finder = SentinelMaster(sentinel, url, client, files)
    elif cluster:
        finder = ClusterNodes(url, password, username, client, files)
    else:
        finder = SingleServer(client(url))
    return Link(finder, keys)


async def check_server(link: Link, url: str, wait_aof: bool) -> None:
    """Check that the Redis is fit; raises RedisUnfitError or UnavailableError. The link waits for the AOF if it can."""
    client = await _reach(link, url)
    memory = await _info(client, "memory")
    append_only = (await _info(client, "persistence")).get("aof_enabled") == 1
    check_fitness(
        shown(url),
        version=str((await _info(client, "server")).get("redis_version", "0")),
        policy=str(memory.get("maxmemory_policy", "noeviction")),
        append_only=append_only,
    )
    link.wait_aof = wait_aof and append_only and await _waits_for_aof(client, shown(url))


async def warn_of_early_answers(store: Store, url: str) -> None:
    """Find out whether WAITAOF keeps its word, and say so if it doesn't.

    With `appendfsync everysec` a sync begins at most once a second, so two waits, each after a write of its own, take
    longer than half a second, unless the server answers before it has synced (redis/redis#13793; Valkey 9.1 does).
    """
    if not store.link.wait_aof:
        return
    began = time.monotonic()
    await store.sync()
    await store.sync()
    if time.monotonic() - began > EARLY_S:
        return
    try:
        reply = str(await store.link.use(lambda client: client.execute_command("CONFIG", "GET", "appendfsync")))
    except NoPermissionError:
        reply = ""  # as it should be: then `everysec` is assumed, which is what nearly everybody runs
    except (RedisError, OSError) as error:
        raise UnavailableError(f"Redis stopped answering ({error}): start it again") from error
    if "always" not in reply:
        _LOG.warning(
            "Redis at %s answers WAITAOF before its AOF is on disk, unless appendfsync is always: %s",
            shown(url),
            WITHDRAWN,
        )


async def make_run(store: Store) -> None:
    """Make the run if it isn't there; raises RedisUnfitError if its data is of another schema."""
    await store.run("initialise", [], [SCHEMA_VERSION, POLICY_0, TAKEN_OVER])


async def check_run(store: Store) -> None:
    """Raise NotFoundError if the run isn't there, RedisUnfitError if its data is of another schema; writes nothing."""
    schema = await store.one("HGET", store.keys.named("meta"), "schema")
    if schema is None:
        raise NotFoundError(
            f"there is no run {store.keys.run} with the prefix {store.keys.namespace} in this Redis: see run.name, "
            "buffer.namespace and buffer.url"
        )
    if schema != str(TAKEN_OVER).encode():
        await make_run(store)


def check_fitness(where: str, version: str, policy: str, append_only: bool) -> None:
    """Refuse a Redis that may lose acknowledged data by itself; warn about one that loses it when it stops."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if numbers < MIN_REDIS_VERSION:
        raise RedisUnfitError(f"Redis at {where} is version {version}: use 7.0 or newer, or Valkey")
    if policy != "noeviction":
        raise RedisUnfitError(
            f"Redis at {where} evicts keys when it is full (maxmemory-policy = {policy}): "
            "set maxmemory-policy noeviction in its configuration"
        )
    if not append_only:
        _LOG.warning("Redis at %s has no AOF: a crash of it loses the buffer; set appendonly yes", where)


def shown(url: str) -> str:
    """The address without its password."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]).geturl()


async def _reach(link: Link, url: str) -> Redis:
    async def ping(client: Redis) -> Redis:
        await client.execute_command("PING")
        return client

    try:
        return await link.use(ping)
    except AuthenticationError as error:
        raise RedisUnfitError(
            f"Redis at {shown(url)} refuses the password or user ({error}): set APRIL_BUFFER__PASSWORD"
        ) from error
    except ResponseError as error:
        raise RedisUnfitError(
            f"Redis at {shown(url)} refuses this user ({error}): give the password as APRIL_BUFFER__PASSWORD"
        ) from error
    except (RedisError, OSError) as error:
        raise UnavailableError(
            f"Redis at {shown(url)} doesn't answer ({error}): start it, or correct buffer.url"
        ) from error


async def _info(client: Redis, section: str) -> dict[str, Any]:
    try:
        return cast(dict[str, Any], await client.execute_command("INFO", section))
    except NoPermissionError as error:
        raise RedisUnfitError(f"the Redis user may not run INFO ({error}): allow +info") from error
    except (RedisError, OSError) as error:
        raise UnavailableError(f"Redis stopped answering ({error}): start it again") from error


async def _waits_for_aof(client: Redis, where: str) -> bool:
    try:
        await client.execute_command("WAITAOF", 0, 0, 1)
    except ResponseError as error:
        _LOG.warning("Redis at %s can't wait for its AOF (%s): %s; use Redis 7.2 or newer", where, error, WITHDRAWN)
        return False
    except (RedisError, OSError) as error:
        raise UnavailableError(f"Redis stopped answering ({error}): start it again") from error
    return True
