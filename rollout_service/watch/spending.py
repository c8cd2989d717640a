"""Where the time of a round goes: all of it, from the offer of the batch before to its own.

Always true:
- every moment is given to causes that add up to it, so that `spent` adds up to the time between two offers;
- while a batch fills, a moment is `generating` as far as the slots that this round has used are in use; what is idle is
  `rewards` in the share of finished samples that wait for a score among all that the batch still waits for, and `tail`
  for the rest;
- what was told of a moment before Redis was known to be away in it is taken back when that is known;
- idle slots that no sample of the round ever used are in `idle_slot_s` alone: they cost no time of the batch.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from protocol.watching import Cause
from rollout_service.engines.interface import EngineStats
from rollout_service.scheduler.decisions import Observation
from rollout_service.scheduler.rounds import Phase, RoundScheduler

T = TypeVar("T")

SLOW_REDIS_S = 0.5  # an answer takes a millisecond, and the engines write meanwhile; what takes longer is an outage
LOOK_AT_REDIS_S = 0.1  # how exactly an outage is timed, well below what makes one
BYTES_A_TOKEN = 8  # its id and its log-prob
FILLING = frozenset({Cause.GENERATING, Cause.CAPS, Cause.LAG})


def cause_of(scheduler: RoundScheduler, seen: Observation) -> Cause:
    """What the service does from now on, or waits for."""
    if scheduler.installing:
        return Cause.WEIGHT_SYNC
    if not seen.generation_allowed:
        return Cause.PAUSED
    if not seen.slots:
        return Cause.ENGINES
    if scheduler.phase is Phase.FILLING:
        return _filling(scheduler, seen)
    if scheduler.phase is not Phase.IDLE:
        return Cause.CUT
    if seen.pending_version is not None:
        return Cause.WEIGHT_SYNC
    return Cause.TRAINER if seen.outstanding > scheduler.limits.lookahead else Cause.LAG


def _filling(scheduler: RoundScheduler, seen: Observation) -> Cause:
    """Generating, unless something other than N' keeps new groups out of free slots."""
    limits, in_flight = scheduler.limits, len(scheduler.table.groups)
    if in_flight + scheduler.unspoken(seen) >= scheduler.target_groups():
        return Cause.GENERATING
    if seen.admission_room <= 0:
        return Cause.CAPS
    batches = limits.max_lag - (seen.next_unleased_version - seen.active_version) + 1
    return Cause.LAG if batches * limits.batch_groups <= in_flight + seen.ready else Cause.GENERATING


async def timed(work: Awaitable[T]) -> tuple[T, float]:
    """What it gives, and the seconds that it took."""
    began_s = time.monotonic()
    return await work, time.monotonic() - began_s


class RedisAway:
    """For how long Redis has not answered, whichever call waited for it. `since`: the buffer's `waiting_since`."""

    def __init__(self, since: Callable[[], float | None]) -> None:
        self._since = since
        self._counted_to = time.time()
        self._away_s = 0.0

    def look(self) -> None:
        """Account for the time since the look before."""
        since, now = self._since(), time.time()
        if since is not None:
            self._away_s += max(0.0, now - max(since, self._counted_to))
            self._counted_to = now

    async def keep_looking(self) -> None:
        """For ever."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_AT_REDIS_S)

    def take(self) -> float:
        """Seconds since it was last asked for."""
        self.look()
        away_s, self._away_s = self._away_s, 0.0
        return away_s


def moment_values(
    scheduler: RoundScheduler, replicas: Sequence[EngineStats], parked_tokens: int, oldest_waiting_s: float
) -> dict[str, float]:
    """What a moment tells besides the buffer's counts."""
    versions = [group.oldest_version for group in scheduler.table.groups.values() if group.oldest_version is not None]
    values: dict[str, float] = {
        "ratio": scheduler.limits.ratio,
        "oldest_waiting_s": round(oldest_waiting_s, 3),
        "parked_bytes": parked_tokens * BYTES_A_TOKEN,
        "tokens_generated": sum(replica.tokens_generated for replica in replicas),
        "slots": sum(replica.slots for replica in replicas if replica.alive),
    }
    return values | ({"oldest_version": min(versions)} if versions else {})


@dataclass(slots=True)
class _State:
    """What holds until the next look."""

    at: float
    cause: Cause
    running: int
    slots: int
    scoring: int


class _Sure(NamedTuple):
    """What was spent up to `at`, which stays so."""

    at: float
    spent: dict[Cause, float]
    slot_s: float
    idle_slot_s: float


@dataclass(slots=True)
class Spending:
    """Seconds by cause since the last offer. Times are the caller's."""

    spent: dict[Cause, float] = field(default_factory=dict[Cause, float])
    slot_s: float = 0.0
    idle_slot_s: float = 0.0
    slots: int = 0
    peak: int = 0
    _state: _State | None = None
    _sure: "_Sure | None" = None

    def look(self, at: float, cause: Cause, running: int, slots: int, scoring: int, redis_s: float = 0.0) -> None:
        """From `at` on this is so. `redis_s`: of the time up to now, what Redis took to answer."""
        if redis_s >= SLOW_REDIS_S:
            self._take_back()
        self.pass_to(at, redis_s)
        self._state = _State(at, cause, running, slots, scoring)
        self._keep()
        self.slots = max(self.slots, slots)
        self.peak = max(self.peak, running)

    def pass_to(self, at: float, redis_s: float = 0.0) -> None:
        """Account for the time up to `at`."""
        state = self._state
        if state is None:
            return
        took_s = max(0.0, at - state.at)
        state.at = max(at, state.at)
        away_s = min(redis_s, took_s) if redis_s >= SLOW_REDIS_S else 0.0
        self._add(Cause.REDIS, away_s)
        self._account(state, took_s - away_s)

    def begin(self) -> None:
        """A round begins: how many slots it uses is not known yet."""
        self.peak, self.slot_s, self.idle_slot_s = 0, 0.0, 0.0
        self._keep()

    def take(self) -> dict[Cause, float]:
        """The batch is offered: what was spent on it; the next one begins with nothing."""
        spent, self.spent = self.spent, {}
        self._keep()
        return spent

    def _keep(self) -> None:
        """What is accounted for by now stays so."""
        if self._state is not None:
            self._sure = _Sure(self._state.at, dict(self.spent), self.slot_s, self.idle_slot_s)

    def _take_back(self) -> None:
        """What was accounted for since the last look, as if no outage had been, is not yet."""
        if self._state is not None and self._sure is not None:
            self._state.at, self.spent, self.slot_s, self.idle_slot_s = self._sure

    def _account(self, state: _State, took_s: float) -> None:
        if state.cause in FILLING or state.cause is Cause.CUT:
            self.slot_s += took_s * state.slots
            self.idle_slot_s += took_s * max(0, state.slots - state.running)
        if state.cause not in FILLING:
            self._add(state.cause, took_s)
            return
        used = max(self.peak, 1)
        busy = min(1.0, state.running / used)
        if state.cause is not Cause.GENERATING:
            busy = min(1.0, state.running / max(state.slots, 1))
        self._add(Cause.GENERATING, took_s * busy)
        idle_s = took_s * (1 - busy)
        if state.cause is not Cause.GENERATING:
            self._add(state.cause, idle_s)
            return
        rewards = state.scoring / (state.scoring + state.running) if state.scoring else 0.0
        self._add(Cause.REWARDS, idle_s * rewards)
        self._add(Cause.TAIL, idle_s * (1 - rewards))

    def _add(self, cause: Cause, seconds: float) -> None:
        if seconds > 0:
            self.spent[cause] = self.spent.get(cause, 0.0) + seconds
