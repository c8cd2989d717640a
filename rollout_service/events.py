"""What the tasks of the service report to its round loop.

Always true: but for `EngineDied`, an event is posted after the buffer's transition that it tells of, so whoever reads
the buffer after taking an event sees at least that.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SampleParked:
    """A running sample is PARKED (or QUEUED again)."""

    sample_id: str


@dataclass(frozen=True, slots=True)
class SampleLost:
    """A running sample is PARKED (or QUEUED again), because its engine died."""

    sample_id: str


@dataclass(frozen=True, slots=True)
class LeasesExpired:
    """The buffer set these samples aside because nobody renewed their leases; `worn_out`: too often already."""

    sample_ids: tuple[str, ...]
    worn_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SampleEnded:
    """A running sample needs no slot any more."""

    sample_id: str


@dataclass(frozen=True, slots=True)
class GroupClosed:
    """A group became READY, or else DROPPED."""

    group_id: str
    ready: bool


@dataclass(frozen=True, slots=True)
class InstallEnded:
    """A policy install is over."""


@dataclass(frozen=True, slots=True)
class EngineDied:
    """A replica died: it must be restarted. Posted before the samples that ran on it are in the buffer again."""

    worker: str


@dataclass(frozen=True, slots=True)
class Changed:
    """Something else that decisions depend on has changed: a lease, a report, a setting, a pause."""


Event = SampleParked | SampleLost | SampleEnded | LeasesExpired | GroupClosed | InstallEnded | EngineDied | Changed


class Mailbox:
    """Events on their way to the round loop; posting never waits."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self.num_posted: Counter[str] = Counter()
        """Events so far, by the name of their class."""

    def post(self, event: Event) -> None:
        """Tell the round loop."""
        self.num_posted[type(event).__name__] += 1
        self._queue.put_nowait(event)

    async def take(self) -> list[Event]:
        """All events there are, waiting for the first."""
        events = [await self._queue.get()]
        while not self._queue.empty():
            events.append(self._queue.get_nowait())
        return events
