"""One way into Redis: every call of the buffer goes through `Store`.

Always true: a transition is sent once, never repeated behind the caller's back; a refusal comes back as a tagged reply
and becomes an error of the tree here and nowhere else; whatever redis-py raises becomes `UnavailableError`, after which
the caller may call again, because a transition that has happened changes nothing the second time.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import (
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from buffer.keys import Keys
from protocol.errors import (
    AprilError,
    ConflictError,
    FencedError,
    LengthError,
    NotFoundError,
    RedisUnfitError,
    TransitionError,
    UnavailableError,
)

LUA_FOLDER = Path(__file__).parent / "lua"
MAX_TRIES = 50  # how often a script may find that what its caller read has moved on, before something is wrong

REFUSALS: dict[bytes, type[AprilError]] = {
    b"conflict": ConflictError,
    b"fenced": FencedError,
    b"length": LengthError,
    b"missing": NotFoundError,
    b"schema": RedisUnfitError,
    b"transition": TransitionError,
}

PASSING_ERRORS = (OutOfMemoryError, ReadOnlyError, MasterDownError, TryAgainError, ClusterDownError)

Arg = str | int | bytes
Call = tuple[Sequence[str], Sequence[Arg]]


@cache
def script_text(name: str) -> str:
    """A transition's Lua with the shared prelude after its first line, which carries the flags."""
    flags, own = (LUA_FOLDER / f"{name}.lua").read_text().split("\n", 1)
    prelude = [path.read_text() for path in sorted((LUA_FOLDER / "prelude").glob("*.lua"))]
    return "\n".join([flags, *prelude, own])


@cache
def _digest(name: str) -> str:
    return sha1(script_text(name).encode(), usedforsecurity=False).hexdigest()


class Store:
    """A client, a run's keys, and the service epoch that every transition carries."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self.client = client
        self.keys = keys
        self.service_epoch = 0

    async def transition(self, name: str, keys: Sequence[str], args: Sequence[Arg]) -> list[Any]:
        """Run a script as the service of this epoch; what it replies after its tag."""
        return await self.run(name, keys, [self.service_epoch, *args])

    async def run(self, name: str, keys: Sequence[str], args: Sequence[Arg]) -> list[Any]:
        """Run a script; raises the error that its refusal names. Own `keys` follow the run's."""
        reply = await self._evaluate(name, [*self.keys.of_run(), *keys], args)
        _check(reply)
        return reply[1:]

    async def transition_on_read(self, name: str, read: Callable[[], Awaitable[Call]]) -> list[Any]:
        """Run a script on keys that must be read first, and again if what was read has moved on meanwhile."""
        for _ in range(MAX_TRIES):
            keys, args = await read()
            reply = await self._evaluate(name, [*self.keys.of_run(), *keys], [self.service_epoch, *args])
            if reply[0] != b"moved":
                _check(reply)
                return reply[1:]
        raise UnavailableError(f"the run changed {MAX_TRIES} times while {name} was prepared: try again")

    async def read(self, *commands: Sequence[Arg]) -> list[Any]:
        """Run read commands in one go; what each replies."""
        if not commands:
            return []
        async with _redis_errors():
            pipeline = self.client.pipeline(transaction=True)
            for command in commands:
                pipeline.execute_command(*command)
            return await pipeline.execute()

    async def one(self, *command: Arg) -> Any:
        """Run one command."""
        async with _redis_errors():
            return await self.client.execute_command(*command)

    async def _evaluate(self, name: str, keys: Sequence[str], args: Sequence[Arg]) -> list[Any]:
        async with _redis_errors():
            command = (len(keys), *keys, *args)
            try:
                reply: Any = await self.client.execute_command("EVALSHA", _digest(name), *command)
            except NoScriptError:
                reply = await self.client.execute_command("EVAL", script_text(name), *command)
        return reply


def _check(reply: list[Any]) -> None:
    if reply[0] != b"ok":
        raise REFUSALS[reply[0]](reply[1].decode())


@asynccontextmanager
async def _redis_errors() -> AsyncGenerator[None]:
    try:
        yield
    except PASSING_ERRORS as error:
        raise UnavailableError(f"Redis can't take this now ({error}): free memory or wait, and try again") from error
    except NoPermissionError as error:
        raise RedisUnfitError(f"the Redis user may not do this ({error}): give it the rights of this run") from error
    except ResponseError as error:
        if str(error).startswith("BUSY"):
            raise UnavailableError(f"Redis runs a long script ({error}): wait, and try again") from error
        raise
    except (RedisError, OSError) as error:
        raise UnavailableError(f"Redis doesn't answer ({error}): start it or wait, and try again") from error
