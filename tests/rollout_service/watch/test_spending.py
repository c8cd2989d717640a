"""Where the time goes: every second has a cause, and the right one."""

import random

import pytest

from protocol.watching import Cause
from rollout_service.scheduler.decisions import Observation, RoundLimits
from rollout_service.scheduler.rounds import Phase, RoundScheduler
from rollout_service.watch.spending import Spending, cause_of

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
