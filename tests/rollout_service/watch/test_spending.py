"""Where the time goes: every second has a cause, and the right one."""

import asyncio
import random
import time
from pathlib import Path

import pytest

from buffer.memory import MemoryBuffer
from protocol.watching import Cause
from rollout_service.scheduler.decisions import Observation, RoundLimits
from rollout_service.scheduler.rounds import Phase, RoundScheduler
from rollout_service.watch.spending import RedisAway, Spending, cause_of
from tests.support.service import running_service, service_settings

LIMITS = RoundLimits(batch_groups=4, group_samples=2, ratio=2.0, lookahead=0, max_lag=4)


def seen(**changes) -> Observation:
    values = {
        "now_s": 0.0,
        "slots": 8,
        "ready": 0,
        "offered": 0,
        "leased_untrained": 0,
        "last_leased_step": 0,
        "trained_step": 0,
        "active_version": 0,
        "newest_version": 0,
        "newest_step": 0,
    }
    return Observation(**(values | changes))


@pytest.mark.parametrize(
    ("phase", "changes", "expected"),
    [
        (Phase.FILLING, {}, Cause.GENERATING),
        (Phase.FILLING, {"admission_room": 0}, Cause.CAPS),
        (Phase.FILLING, {"admission_room": 0, "ready": 8}, Cause.GENERATING),  # N' groups are there: nothing is missing
        (Phase.FILLING, {"newest_version": 5, "active_version": 0}, Cause.LAG),
        (Phase.FILLING, {"slots": 0}, Cause.ENGINES),
        (Phase.CUTTING, {}, Cause.CUT),
        (Phase.OFFERING, {}, Cause.CUT),
        (Phase.IDLE, {"leased_untrained": 1}, Cause.TRAINER),
        (Phase.IDLE, {"leased_untrained": 1, "pending_version": 3}, Cause.WEIGHT_SYNC),
        (Phase.IDLE, {}, Cause.LAG),
        (Phase.IDLE, {"generation_allowed": False}, Cause.PAUSED),
    ],
)
def test_cause_of_what_the_service_does(phase: Phase, changes: dict, expected: Cause) -> None:
    scheduler = RoundScheduler(LIMITS)
    scheduler.phase = phase
    assert cause_of(scheduler, seen(**changes)) is expected


def test_every_second_has_a_cause() -> None:
    rng = random.Random(7)
    spending, at = Spending(), 10.0
    spending.look(at, Cause.GENERATING, 0, 8, 0)
    for _ in range(500):
        at += rng.random()
        spending.look(at, rng.choice(list(Cause)), rng.randrange(9), rng.choice([0, 8]), rng.randrange(4), rng.random())
        if rng.random() < 0.05:
            spending.begin()
    assert sum(spending.take().values()) == pytest.approx(at - 10.0)
    assert spending.take() == {}


@pytest.mark.parametrize(
    ("running", "scoring", "tail", "rewards"),
    [(8, 0, 0.0, 0.0), (2, 0, 0.75, 0.0), (0, 3, 0.0, 1.0), (2, 2, 0.375, 0.375), (4, 12, 0.125, 0.375)],
)
def test_idle_slots_are_the_tails_or_the_rewards(running: int, scoring: int, tail: float, rewards: float) -> None:
    spending = Spending()
    spending.look(0.0, Cause.GENERATING, 8, 16, 0)
    spending.look(0.0, Cause.GENERATING, running, 16, scoring)
    spending.pass_to(1.0)
    spent = spending.take()
    assert spent.get(Cause.TAIL, 0.0) == pytest.approx(tail)
    assert spent.get(Cause.REWARDS, 0.0) == pytest.approx(rewards)
    assert spent.get(Cause.GENERATING, 0.0) == pytest.approx(1 - tail - rewards)
    assert spending.idle_slot_s == pytest.approx(16 - running)  # slots that the round never used are idle, too


def test_a_slow_redis_is_told_apart_and_a_quick_one_is_not() -> None:
    spending = Spending()
    spending.look(0.0, Cause.TRAINER, 0, 8, 0)
    spending.look(10.0, Cause.TRAINER, 0, 8, 0, redis_s=4.0)
    spending.look(11.0, Cause.TRAINER, 0, 8, 0, redis_s=0.01)
    assert spending.take() == {Cause.REDIS: pytest.approx(4.0), Cause.TRAINER: pytest.approx(7.0)}


def test_a_clock_that_goes_back_costs_nothing() -> None:
    spending = Spending()
    spending.look(10.0, Cause.TRAINER, 0, 8, 0)
    spending.look(5.0, Cause.TRAINER, 0, 8, 0)
    spending.pass_to(11.0)
    assert spending.take()[Cause.TRAINER] <= 6.0 + 1e-9


def test_an_outage_counts_as_one_though_somebody_asked_meanwhile() -> None:
    spending = Spending()
    spending.look(0.0, Cause.GENERATING, 8, 8, 0)
    spending.look(2.0, Cause.GENERATING, 2, 8, 0)
    spending.pass_to(10.0)
    spending.pass_to(20.0)
    spending.look(28.0, Cause.GENERATING, 8, 8, 0, redis_s=25.0)
    spent = spending.take()
    assert spent[Cause.REDIS] == pytest.approx(25.0)
    assert sum(spent.values()) == pytest.approx(28.0)
    assert spent[Cause.TAIL] == pytest.approx(0.75)  # of the second that was none, six of eight slots


def test_an_outage_never_takes_back_what_an_offered_batch_was_told() -> None:
    spending = Spending()
    spending.look(0.0, Cause.CUT, 0, 8, 0)
    spending.pass_to(1.0)
    assert spending.take() == {Cause.CUT: pytest.approx(1.0)}
    spending.look(6.0, Cause.TRAINER, 0, 8, 0, redis_s=9.0)
    assert spending.take() == {Cause.REDIS: pytest.approx(5.0)}


def test_an_outage_is_timed_whichever_call_meets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now, since = [100.0], [None]
    monkeypatch.setattr("rollout_service.watch.spending.time.time", lambda: now[0])
    away = RedisAway(lambda: since[0])
    now[0], since[0] = 110.0, 104.0
    away.look()
    now[0] = 112.0
    away.look()
    since[0] = None
    now[0] = 115.0
    assert away.take() == pytest.approx(8.0)
    assert away.take() == 0.0


class OfferMeetsAnOutage(MemoryBuffer):
    """Redis is away for a while when the first batch is to be offered."""

    since: float | None = None
    offered = False

    @property
    def waiting_since(self) -> float | None:
        return self.since

    async def offer(self, num_groups: int) -> bool:
        if not self.offered:
            self.offered, self.since = True, time.time()
            await asyncio.sleep(1.0)
            self.since = None
        return await super().offer(num_groups)


async def test_an_outage_in_a_transition_is_no_tail(tmp_path: Path) -> None:
    async with running_service(service_settings(tmp_path), OfferMeetsAnOutage()) as service:
        headers = await service.open_trainer()
        for step in (1, 2):
            await service.batch(step, headers)
            await service.publish(step, headers)
        await service.until(lambda: len(service.parts.watch.rounds) >= 2)
        spent = service.parts.watch.rounds[1].spent
    assert spent[Cause.REDIS] == pytest.approx(1.0, abs=0.15)
