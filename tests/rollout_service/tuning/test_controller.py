"""The controller of the ratio: it converges, follows, rests, and keeps within bounds."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.tuning.controller import (
    BUBBLE_HIGH,
    BUBBLE_LOW,
    DEAD_BAND,
    SETTLING_ROUNDS,
    SMALLEST_STEP,
    STEP,
    ControllerState,
    Direction,
    RoundMeasures,
    TuneBounds,
    Tuning,
    step_controller,
)

BOUNDS = TuneBounds()


def drive(measure, num_rounds, ratio=1.0, bounds=BOUNDS, state=None) -> list[Tuning]:
    """`measure` of the ratio in force gives what the round measured."""
    state = state or ControllerState(ratio)
    decided = []
    for number in range(num_rounds):
        state, tuning = step_controller(state, measure(number, state.ratio), bounds)
        decided.append(tuning)
    return decided


def plant(tail: float, rng: random.Random | None = None, noise: float = 0.0):
    """An engine whose bubble falls as the ratio rises, and whose off-policy share and prefills rise."""

    def measure(_: int, ratio: float) -> RoundMeasures:
        shake = 1 + (rng.gauss(0, noise) if rng else 0.0)
        bubble = min(1.0, max(0.0, tail / ratio**2 * shake))
        share = max(0.0, 1 - 1 / ratio)
        return RoundMeasures(bubble, reprefill=0.05 * share, ess=1 - 0.2 * share, off_policy=share)

    return measure


def moves(decided: list[Tuning]) -> list[Tuning]:
    return [tuning for tuning in decided if tuning.direction is not Direction.STAY]


def turns(decided: list[Tuning]) -> int:
    directions = [tuning.direction for tuning in moves(decided)]
    return sum(a is not b for a, b in pairwise(directions))


@pytest.mark.parametrize("tail", [0.2, 0.35, 0.5])
@pytest.mark.parametrize("start", [1.0, 3.0])
def test_it_converges_on_a_stationary_tail_and_stays_there(tail, start):
    decided = drive(plant(tail), 120, start)
    assert not moves(decided[60:])
    assert BUBBLE_LOW <= plant(tail)(0, decided[-1].ratio).bubble <= BUBBLE_HIGH * 1.15
    assert turns(decided) <= 1


@settings(max_examples=60, deadline=None)
@given(tail=st.floats(0.05, 0.7), seed=st.integers(0, 1000), noise=st.floats(0.0, 0.4), start=st.floats(1.0, 3.0))
def test_noise_does_not_make_it_oscillate(tail, seed, noise, start):
    decided = drive(plant(tail, random.Random(seed), noise), 200, start)
    assert turns(decided) <= 3
    assert len(moves(decided[120:])) <= 2
    late = [tuning.ratio for tuning in decided[120:]]
    assert max(late) / min(late) <= (1 + STEP) ** 2


def test_noise_around_a_good_ratio_moves_nothing():
    rng = random.Random(1)
    middle = (BUBBLE_LOW + BUBBLE_HIGH) / 2

    def measure(_: int, __: float) -> RoundMeasures:
        return RoundMeasures(max(0.0, rng.gauss(middle, 0.03)), ess=0.9)

    assert not moves(drive(measure, 300, 1.5))


def test_one_bad_round_moves_nothing():
    def measure(number: int, _: float) -> RoundMeasures:
        return RoundMeasures(0.3 if number == 20 else 0.08)

    assert not moves(drive(measure, 40, 1.5))


def test_it_follows_a_longer_tail_up_and_a_shorter_one_down_without_oscillation():
    def measure(number: int, ratio: float) -> RoundMeasures:
        return plant(0.15 if number < 60 else 0.6 if number < 140 else 0.05)(number, ratio)

    decided = drive(measure, 220, 1.0)
    before, middle, after = decided[59].ratio, decided[139].ratio, decided[-1].ratio
    assert before < 1.3 < 1.6 < middle
    assert after < middle
    assert "idle while a batch fills" in next(t for t in decided[60:140] if t.direction is Direction.UP).reason
    assert turns(decided) <= 2


def test_a_step_is_bounded_and_a_change_is_waited_for():
    decided = drive(plant(0.7), 100, 1.0)
    ratios = [1.0, *(tuning.ratio for tuning in decided)]
    assert all(b / a <= 1 + STEP + 1e-3 for a, b in pairwise(ratios))
    changed = [number for number, tuning in enumerate(decided) if tuning.direction is not Direction.STAY]
    assert all(b - a >= SETTLING_ROUNDS for a, b in pairwise(changed))


@settings(deadline=None)
@given(
    lowest=st.floats(1.0, 2.0),
    width=st.floats(0.0, 2.0),
    start=st.floats(1.0, 5.0),
    bubble=st.floats(0.0, 1.0),
    ess=st.one_of(st.none(), st.floats(0.0, 1.0)),
)
def test_the_users_bounds_are_kept_from_the_first_round_on(lowest, width, start, bubble, ess):
    bounds = TuneBounds(min_ratio=lowest, max_ratio=lowest + width)
    for tuning in drive(lambda *_: RoundMeasures(bubble, ess=ess), 30, start, bounds):
        assert lowest - 1e-3 <= tuning.ratio <= lowest + width + 1e-3


def test_limits_come_before_the_bubble():
    bounds = replace(BOUNDS, max_off_policy=0.3, min_ess=0.8)
    idle = RoundMeasures(bubble=0.6, ess=0.9, off_policy=0.1)
    for broken, text in [
        (replace(idle, ess=0.5), "effective sample size is 0.50"),
        (replace(idle, off_policy=0.6), "60% of trained tokens are off-policy"),
        (replace(idle, preemptions=0.5), "50% of samples started are preempted"),
        (replace(idle, reprefill=0.4), "40% of processed tokens are prefilled again"),
        (replace(idle, growth=0.5), "the buffer grows by 0.50 batches"),
    ]:
        first = moves(drive(lambda *_, seen=broken: seen, 10, 2.0, bounds))[0]
        assert first.direction is Direction.DOWN
        assert text in first.reason


def test_it_stops_below_a_limit_instead_of_running_into_it():
    bounds = replace(BOUNDS, max_off_policy=0.3)
    decided = drive(plant(0.9), 200, 1.0, bounds)
    assert turns(decided) <= 3
    assert not moves(decided[120:])
    assert plant(0.9)(0, decided[-1].ratio).off_policy <= 0.3 * 1.1


def stiff_plant(steepness: float, idle: float, rng: random.Random | None = None, noise: float = 0.0):
    """Slots idle at every ratio, and an off-policy share that rises fast at first."""

    def measure(_: int, ratio: float) -> RoundMeasures:
        shake = 1 + (rng.gauss(0, noise) if rng else 0.0)
        share = 0.35 * (1 - math.exp(-(ratio - 1) * steepness)) + 0.3 * (ratio - 1)
        off_policy = min(1.0, max(0.0, share * shake))
        return RoundMeasures(idle + 0.3 * math.exp(-(ratio - 1) * 3), ess=1 - 0.4 * off_policy, off_policy=off_policy)

    return measure


@pytest.mark.parametrize("start", [1.0, 1.25, 2.0, 3.0])
@pytest.mark.parametrize(
    "bounds",
    [replace(BOUNDS, max_off_policy=share) for share in (0.02, 0.1, 0.2, 0.3, 0.4)]
    + [replace(BOUNDS, min_ess=least) for least in (0.85, 0.9, 0.95)],
)
def test_a_limit_is_kept_even_where_every_smaller_ratio_was_too_small(bounds, start):
    plant = stiff_plant(6, 0.3)
    decided = drive(plant, 300, start, bounds)
    last = decided[-1].ratio
    seen = plant(0, last)
    assert seen.off_policy <= bounds.max_off_policy * (1 + DEAD_BAND) or last == bounds.min_ratio
    assert 1 - seen.ess <= (1 - bounds.min_ess) * (1 + DEAD_BAND) or last == bounds.min_ratio
    assert not moves(decided[150:])
    assert turns(decided) <= 4
    assert "is idle" in decided[-1].reason
    assert "wanted" in decided[-1].reason, "the limit that keeps the ratio down is named"
    assert "no limit is passed" not in decided[-1].reason


@settings(max_examples=40, deadline=None)
@given(
    steepness=st.floats(0.5, 12.0),
    idle=st.floats(0.0, 0.5),
    limit=st.floats(0.02, 0.8),
    start=st.floats(1.0, 3.0),
    seed=st.integers(0, 1000),
    noise=st.floats(0.0, 0.1),
)
def test_limits_do_not_make_it_oscillate(steepness, idle, limit, start, seed, noise):
    bounds = replace(BOUNDS, max_off_policy=limit)
    decided = drive(stiff_plant(steepness, idle, random.Random(seed), noise), 300, start, bounds)
    assert turns(decided) <= 6
    assert len(moves(decided[200:])) <= 4
    still = stiff_plant(steepness, idle)(0, decided[-1].ratio)
    assert still.off_policy <= limit * (1 + DEAD_BAND) * (1 + noise) or decided[-1].ratio == bounds.min_ratio


def test_a_limit_that_was_passed_is_forgotten_when_far_more_slots_idle_than_then():
    def measure(number: int, ratio: float) -> RoundMeasures:
        if number < 100:
            return RoundMeasures(0.2, off_policy=0.6 if ratio > 1.4 else 0.1)
        return RoundMeasures(0.6, off_policy=0.1)

    bounds = replace(BOUNDS, max_off_policy=0.3)
    decided = drive(measure, 200, 2.0, bounds)
    assert decided[99].ratio <= 1.4
    assert "no ratio has fewer within the limits" in decided[99].reason
    assert decided[-1].ratio == bounds.max_ratio


def test_what_is_reported_no_more_is_not_averaged_on():
    state, _ = step_controller(ControllerState(1.5), RoundMeasures(0.08, ess=0.4, off_policy=0.9), BOUNDS)
    _, tuning = step_controller(state, RoundMeasures(0.08), BOUNDS)
    assert (tuning.measured.ess, tuning.measured.off_policy) == (None, None)


def test_a_full_engine_gives_the_ratio_back_down_to_one():
    decided = drive(lambda *_: RoundMeasures(bubble=0.0), 100, 2.0)
    assert decided[-1].ratio == 1.0
    assert "the smallest ratio allowed" in decided[-1].reason


def test_between_two_ratios_that_are_both_wrong_it_rests():
    def cliff(_: int, ratio: float) -> RoundMeasures:
        return RoundMeasures(bubble=0.4 if ratio < 1.5 else 0.0)

    decided = drive(cliff, 300, 1.0)
    assert turns(decided) <= 5
    assert not moves(decided[150:])
    assert "resting between the two" in decided[-1].reason
    assert abs(decided[-1].ratio / 1.5 - 1) < 2 * SMALLEST_STEP
