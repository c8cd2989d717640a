"""Everybody who waits, for what, and since when.

Always true: a wait keeps its begin for as long as it goes on, however its text changes; one that ended and begins again
is a new one. Times are seconds since the epoch by the clock of whoever calls.
"""

import re
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import NamedTuple

from protocol.watching import Wait

LINGER_S = 3.0  # a trainer asks again a moment after its long poll ends: that is one wait
NUMBERS = re.compile(r"\d+")


class Open(NamedTuple):
    """A wait as it is now. `key` names it whatever its text says; `since` None: since it is known of."""

    key: str
    who: str
    waits_for: str
    since: float | None = None


class WaitBook:
    """Since when each wait goes on."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[float, float]] = {}  # key -> (since, last seen)

    def update(self, now: float, waits: Iterable[Open]) -> list[Wait]:
        """The waits there are now, the oldest first."""
        found: list[Wait] = []
        for wait in waits:
            known = self._since.get(wait.key)
            since = wait.since if wait.since is not None else known[0] if known else now
            self._since[wait.key] = (since, now)
            found.append(Wait(who=wait.who, waits_for=wait.waits_for, since=round(min(since, now), 3)))
        self._since = {key: entry for key, entry in self._since.items() if now - entry[1] <= LINGER_S}
        return sorted(found, key=lambda wait: wait.since or now)


def counted(count: int, one: str) -> str:
    """`1 batch`, `2 batches`."""
    return f"{count} {one}" if count == 1 else f"{count} {one}{'es' if one.endswith('ch') else 's'}"


def scheduler_wait(text: str, number: int) -> Open:
    """A wait of the round scheduler in round `number`; the text's numbers change while it goes on."""
    return Open(f"round {number}:{NUMBERS.sub('#', text)}", "the round", text)


class LongPoll:
    """One call."""

    def __init__(self) -> None:
        self.answered = False


class LongPolls:
    """Trainers that ask for a batch which is not there yet."""

    def __init__(self) -> None:
        self._open: dict[int, list[float]] = {}  # step -> since when each poll waits
        self._ended: dict[int, tuple[float, float]] = {}  # step -> (since, ended) of polls that ended without a batch

    @contextmanager
    def asking(self, step: int, clock: Callable[[], float]) -> Generator["LongPoll"]:
        """While somebody asks for the batch of `step`; it says in `answered` whether they got it."""
        since, ended = self._ended.pop(step, (0.0, -LINGER_S))
        now = clock()
        begin = since if now - ended < LINGER_S else now
        self._open.setdefault(step, []).append(begin)
        poll = LongPoll()
        try:
            yield poll
        finally:
            polls = self._open[step]
            polls.remove(begin)
            if not polls:
                del self._open[step]
            self._ended = {} if poll.answered else {step: (begin, clock())}

    @property
    def asked(self) -> bool:
        """Somebody asks now."""
        return bool(self._open)

    def waits(self, now: float) -> list[Open]:
        """One for each step that is asked for."""
        since = {step: min(polls) for step, polls in self._open.items()}
        since |= {s: begin for s, (begin, ended) in self._ended.items() if s not in since and now - ended <= LINGER_S}
        return [Open(f"trainer:{s}", "the trainer", f"the batch of step {s}", at) for s, at in sorted(since.items())]
