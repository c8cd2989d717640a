"""Connecting to Redis, and whether it can keep the buffer's promises."""

import json
import logging
import re
from typing import Any, cast
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from buffer.keys import Keys
from buffer.scripts import Store
from protocol.errors import RedisUnfitError, SettingsError, UnavailableError

SCHEMA_VERSION = 1  # of keys and bytes; raised by every change that an older release could not read
MIN_REDIS_VERSION = (7, 0)  # the first whose scripts carry flags: what drains the buffer works when memory is full
CONNECT_TIMEOUT_S = 5.0  # a Redis that does not accept within this is away
ANSWER_TIMEOUT_S = 30.0  # longer than the slowest transition (an ack of thousands of groups) by two orders
POOL_TIMEOUT_S = 60.0  # waiting for a free connection is back-pressure, not a fault

_LOG = logging.getLogger(__name__)
POLICY_0 = json.dumps({"step": 0, "trainer_epoch": 0, "path": ""})


def open_client(url: str, password: str | None, username: str | None, max_connections: int) -> Redis:
    """A client that never sends a command twice by itself: only the caller knows what may be repeated."""
    given = {"password": password, "username": username}
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=POOL_TIMEOUT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=ANSWER_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **{name: value for name, value in given.items() if value is not None},
        )
    except ValueError as error:
        raise SettingsError(
            f"buffer.url = {shown(url)} is no Redis address ({error}): use redis://, rediss:// or unix://"
        ) from error
    return Redis(connection_pool=pool)


async def connect_store(client: Redis, keys: Keys, url: str) -> Store:
    """Check that the Redis is fit and the run's data readable; raises RedisUnfitError or UnavailableError."""
    await _check_reachable(client, url)
    memory = await _info(client, "memory")
    check_fitness(
        shown(url),
        version=str((await _info(client, "server")).get("redis_version", "0")),
        policy=str(memory.get("maxmemory_policy", "noeviction")),
        append_only=(await _info(client, "persistence")).get("aof_enabled") == 1,
    )
    store = Store(client, keys)
    await store.run("initialise", [], [SCHEMA_VERSION, POLICY_0])
    return store


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


async def _check_reachable(client: Redis, url: str) -> None:
    try:
        await client.execute_command("PING")
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
