"""One way into Redis: every call of the buffer goes through `Store`.

Always true: a transition that is sent again with the same arguments changes nothing the second time and gives the same
answer, either because the run's own state shows that it has happened or because it carries a nonce, under which Redis
keeps its answer; so whatever gets no answer is sent again while patience lasts. A refusal comes back as a tagged reply
and becomes an error of the tree here and nowhere else; what redis-py raises becomes `UnavailableError` when it passes.
"""

import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from buffer.keys import KINDS, Keys, expected_kind
from buffer.link import Link
from buffer.patience import heeding_cancellation, patiently
from protocol.errors import (
    AprilError,
    BufferFullError,
    ConflictError,
    DataError,
    FencedError,
    LengthError,
    NotFoundError,
    RedisUnfitError,
    SettingsError,
    TransitionError,
    UnavailableError,
)

LUA_FOLDER = Path(__file__).parent / "lua"
AOF_TIMEOUT_MS = 5000  # `everysec` takes about 1 s, 2 s on a busy disk; less than what an answer may take
WITHDRAWN = "a power loss may now undo about a second of leases, acks and policy activations that were answered"
SCAN_COUNT = 1000  # keys a SCAN call looks at: well under a millisecond
MAX_TRIES = 50  # how often a script may find that what its caller read has moved on, before something is wrong

REFUSALS: dict[bytes, type[AprilError]] = {
    b"conflict": ConflictError,
    b"fenced": FencedError,
    b"full": BufferFullError,
    b"identity": SettingsError,
    b"length": LengthError,
    b"missing": NotFoundError,
    b"schema": RedisUnfitError,
    b"transition": TransitionError,
}

PASSING_ERRORS = (OutOfMemoryError, ReadOnlyError, MasterDownError, TryAgainError, ClusterDownError, AskError)
# Errors that redis-py has no class for: a long script, too few replicas, a full disk, a master that steps down.
PASSING_WORDS = ("BUSY", "NOREPLICAS", "MISCONF", "UNBLOCKED")

WRONG_TYPE = "WRONGTYPE"  # within the sentence of a script or of a pipeline

Arg = str | int | bytes
Call = tuple[Sequence[str], Sequence[Arg]]
T = TypeVar("T")

_LOG = logging.getLogger(__name__)


@cache
def script_text(name: str) -> str:
    """A transition's Lua with the shared prelude after its first line, which carries the flags."""
    flags, own = (LUA_FOLDER / f"{name}.lua").read_text().split("\n", 1)
    prelude = [path.read_text() for path in sorted((LUA_FOLDER / "prelude").glob("*.lua"))]
    return "\n".join([flags, *prelude, own])


@cache
def _digest(name: str) -> str:
    return sha1(script_text(name).encode(), usedforsecurity=False).hexdigest()


def new_nonce() -> str:
    """What tells a call from every other, and its repetitions from nothing."""
    return secrets.token_hex(8)


class _WrongTypeError(Exception):
    """Something that isn't the buffer wrote a key of the run."""


class Store:
    """A link to Redis, and how long its calls are repeated. Views share the link, and with it the service epoch."""

    def __init__(self, link: Link, patience_s: float = 0.0) -> None:
        self.link = link
        self.patience_s = patience_s

    @property
    def keys(self) -> Keys:
        """The run's keys."""
        return self.link.keys

    @property
    def service_epoch(self) -> int:
        """What every transition carries."""
        return self.link.service_epoch

    def impatient(self) -> "Store":
        """A view whose calls are made once."""
        return Store(self.link)

    async def transition(self, name: str, keys: Sequence[str], args: Sequence[Arg]) -> list[Any]:
        """Run a script as the service of this epoch; what it replies after its tag."""
        return await self.run(name, keys, [self.service_epoch, *args])

    async def run(self, name: str, keys: Sequence[str], args: Sequence[Arg]) -> list[Any]:
        """Run a script; raises the error that its refusal names. Own `keys` follow the run's."""
        reply = await self._evaluate(name, [*self.link.run_keys, *keys], args)
        _check(reply)
        return reply[1:]

    async def transition_on_read(
        self, name: str, read: Callable[[], Awaitable[Call]], waits_when_full: bool = True
    ) -> list[Any]:
        """Run a script on keys that must be read first, and again if what was read has moved on meanwhile.

        A full Redis is waited for like one that is away, or else is a BufferFullError at once.
        """
        for _ in range(MAX_TRIES):
            keys, args = await read()
            run_keys, epoch = self.link.run_keys, self.service_epoch
            reply = await self._evaluate(name, [*run_keys, *keys], [epoch, *args], waits_when_full)
            if reply[0] != b"moved":
                _check(reply)
                return reply[1:]
        raise UnavailableError(f"the run changed {MAX_TRIES} times while {name} was prepared: try again")

    async def read(self, *commands: Sequence[Arg]) -> list[Any]:
        """Run read commands in one go; what each replies."""
        if not commands:
            return []

        async def send(client: Redis) -> list[Any]:
            pipeline = client.pipeline(transaction=True)
            for command in commands:
                pipeline.execute_command(*command)
            return await pipeline.execute()

        return await self._call(send)

    async def one(self, *command: Arg) -> Any:
        """Run one command."""

        async def send(client: Redis) -> Any:
            return await client.execute_command(*command)

        return await self._call(send)

    async def all_keys(self, kind: str | None = None) -> list[str]:
        """Every key of the run, or those of one Redis type, without the run's prefix, found by SCAN."""
        cursor, found = 0, set[bytes]()
        of_type = ("TYPE", kind) if kind else ()
        while True:
            reply = await self.one("SCAN", cursor, "MATCH", self.keys.prefix + "*", "COUNT", SCAN_COUNT, *of_type)
            cursor = int(reply[0])
            found.update(reply[1])
            if cursor == 0:
                return sorted(key.decode().removeprefix(self.keys.prefix) for key in found)

    async def sync(self) -> None:
        """Return when Redis' AOF has on disk all that was written before, if this run waits for that."""
        if self.link.wait_aof:
            await self._call(self._sync)

    async def _sync(self, client: Redis) -> None:
        keys = self.link.run_keys
        pipeline = client.pipeline(transaction=False)
        pipeline.execute_command("EVAL", script_text("sync"), len(keys), *keys)
        pipeline.execute_command("WAITAOF", 1, self.link.wait_replicas, AOF_TIMEOUT_MS)
        reply, waited = await pipeline.execute(raise_on_error=False)
        if isinstance(reply, Exception):
            raise reply
        _check(reply)
        if isinstance(waited, ResponseError) and not isinstance(waited, PASSING_ERRORS) and not _passes(waited):
            _LOG.warning("Redis no longer waits for its AOF (%s): %s", waited, WITHDRAWN)
            self.link.wait_aof = False
        elif isinstance(waited, Exception):
            raise waited
        elif waited[0] < 1:
            raise UnavailableError(
                f"Redis' AOF was not on disk after {AOF_TIMEOUT_MS / 1000:g} s: see whether its disk is slow or full"
            )
        elif waited[1] < self.link.wait_replicas:
            raise UnavailableError(
                f"{waited[1]} of {self.link.wait_replicas} replicas had it in their AOF in time: start the others, or "
                "lower buffer.sentinel.wait_replicas"
            )

    async def _evaluate(
        self, name: str, keys: Sequence[str | bytes], args: Sequence[Arg], waits_when_full: bool = True
    ) -> list[Any]:
        command = (len(keys), *keys, *args)

        async def send(client: Redis) -> Any:
            try:
                return await client.execute_command("EVALSHA", _digest(name), *command)
            except NoScriptError:
                return await client.execute_command("EVAL", script_text(name), *command)

        return await self._call(send, waits_when_full)

    async def _call(self, send: Callable[[Redis], Awaitable[T]], waits_when_full: bool = True) -> T:
        async def once() -> T:
            async with _redis_errors():
                with self.link.outage.asking():
                    return await heeding_cancellation(self.link.use(send))

        try:
            return await patiently(once, self.patience_s, self.link.outage, waits_when_full)
        except _WrongTypeError as error:
            raise DataError(
                f"keys of the run {self.keys.run} are of another type than the buffer writes "
                f"({', '.join(await self._misplaced()) or error}), so something else wrote them: bring the run's Redis "
                "back as it was, or go on under another run.name"
            ) from error

    async def _misplaced(self) -> list[str]:
        found = {name: kind for kind in KINDS for name in await self.all_keys(kind)}
        expected = {name: expected_kind(name) for name in await self.all_keys()}
        wrong = {name: kind for name, kind in expected.items() if kind not in (None, found.get(name))}
        return [f"{self.keys.prefix}{name} is no {kind}" for name, kind in wrong.items()]


def _check(reply: list[Any]) -> None:
    if reply[0] != b"ok":
        raise REFUSALS[reply[0]](reply[1].decode())


def _passes(error: ResponseError) -> bool:
    return str(error).startswith(PASSING_WORDS)


@asynccontextmanager
async def _redis_errors() -> AsyncGenerator[None]:
    try:
        yield
    except MovedError as error:
        raise RedisUnfitError(
            f"Redis at this address is a node of a cluster ({error}): set buffer.cluster = true"
        ) from error
    except OutOfMemoryError as error:
        raise BufferFullError(f"Redis is full ({error}): raise its maxmemory, or wait, and try again") from error
    except PASSING_ERRORS as error:
        raise UnavailableError(f"Redis can't take this now ({error}): free memory or wait, and try again") from error
    except NoPermissionError as error:
        raise RedisUnfitError(f"the Redis user may not do this ({error}): give it the rights of this run") from error
    except ResponseError as error:
        if _passes(error):
            raise UnavailableError(f"Redis can't take this now ({error}): mend that or wait, and try again") from error
        if WRONG_TYPE in str(error):
            raise _WrongTypeError(str(error)) from error
        raise
    except (RedisError, OSError) as error:
        raise UnavailableError(f"Redis doesn't answer ({error}): start it or wait, and try again") from error
