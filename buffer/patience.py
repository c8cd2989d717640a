"""Waiting for a Redis that doesn't answer.

Always true: who is cancelled while it waits ends; a call is made again only while it failed with UnavailableError and
its patience lasts, at most once a second; however many calls wait at once, they are one outage, which is logged when it
begins and when it ends, and `waiting_since` says since when for as long as one of them waits. A call that has had no
answer for `SLOW_CALL_S` counts as waiting: a Redis that is stopped cuts no connection, and its silence is an error only
after the much longer time-out.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

from protocol.errors import BufferFullError, UnavailableError

FIRST_WAIT_S = 0.02  # a connection that was cut is there again at once
SLOW_CALL_S = 1.0  # a transition takes a millisecond; with a look at Redis every 2 s, silence is known after 1 to 3
LONGEST_WAIT_S = 1.0  # more would idle the engines after Redis is back, less would load it while it reads its AOF

T = TypeVar("T")

_LOG = logging.getLogger(__name__)


class Outage:
    """The calls that wait for Redis now. Times are seconds since the epoch."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._num_waiting = 0
        self._asked: dict[int, float] = {}  # calls that are under way, the oldest first
        self._numbers = itertools.count()

    @property
    def waiting_since(self) -> float | None:
        """Since when calls wait for Redis, None if none does."""
        if self._since is not None:
            return self._since
        oldest = next(iter(self._asked.values()), None)
        return oldest if oldest is not None and time.time() - oldest > SLOW_CALL_S else None

    @contextmanager
    def asking(self) -> Generator[None]:
        """A call is under way until the block is left."""
        number = next(self._numbers)
        self._asked[number] = time.time()
        try:
            yield
        finally:
            del self._asked[number]

    @contextmanager
    def waiting(self, error: UnavailableError, since: float) -> Generator[None]:
        """One more call waits, because of `error`, until the block is left: by an exception if it gave up.

        It was made first at `since`.
        """
        self._num_waiting += 1
        if self._since is None:
            self._since = since
            _LOG.warning("waiting for Redis: %s", error)
        answered = False
        try:
            yield
            answered = True
        finally:
            self._num_waiting -= 1
            if self._num_waiting == 0:
                waited_s, self._since = time.time() - self._since, None
                _LOG.warning("Redis %s after %.1f s", "answers again" if answered else "was given up", waited_s)


async def heeding_cancellation(call: Awaitable[T]) -> T:
    """What `call` returns or raises, unless its task was cancelled meanwhile, which is then never forgotten.

    redis-py sends within `asyncio.wait_for`, and before Python 3.12 that drops a cancellation which comes as the send
    completes: a task that asks Redis for ever would never end (https://github.com/python/cpython/issues/86296).
    """
    task = asyncio.current_task()
    assert task is not None, "awaited by a task"
    before = task.cancelling()
    try:
        return await call
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


async def patiently(
    call: Callable[[], Awaitable[T]], patience_s: float, outage: Outage, waits_when_full: bool = True
) -> T:
    """What `call` returns, the first time or a later one; its last UnavailableError when patience has run out.

    Without `waits_when_full` a BufferFullError is raised whenever it comes.
    """
    since, deadline = time.time(), time.monotonic() + patience_s
    try:
        return await call()
    except UnavailableError as error:
        if patience_s <= 0 or (isinstance(error, BufferFullError) and not waits_when_full):
            raise
        first = error
    with outage.waiting(first, since):
        return await _again(call, deadline, waits_when_full)


async def _again(call: Callable[[], Awaitable[T]], deadline: float, waits_when_full: bool) -> T:
    wait_s = FIRST_WAIT_S
    while True:
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        try:
            return await call()
        except BufferFullError:
            if not waits_when_full or time.monotonic() >= deadline:
                raise
        except UnavailableError:
            if time.monotonic() >= deadline:
                raise
