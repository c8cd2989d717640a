"""Forecasts of lengths: own history, source, whole; drift; censoring."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.scheduler.admission import UNKNOWN
from rollout_service.tuning.forecast import LengthForecast
from rollout_service.tuning.survival import kaplan_meier


def told(
    forecast: LengthForecast, rng: random.Random, prompts: dict[str, tuple[str, float]], within: float, times: int
):
    for prompt_id, (source, median) in prompts.items():
        for _ in range(times):
            forecast.finished(prompt_id, source, max(1, round(rng.lognormvariate(math.log(median), within))))


def test_it_says_nothing_before_anything_has_finished():
    forecast = LengthForecast(4)
    assert forecast.outlook("p", "s", 10) == UNKNOWN
    assert forecast.remaining("p", "s", 10) == 0


def test_a_prompts_own_history_counts_more_than_its_source():
    forecast = LengthForecast(4)
    prompts = {f"p{i}": ("s", 20.0 * 4 ** (i % 3)) for i in range(60)}
    told(forecast, random.Random(0), prompts, 0.2, 4)
    short, middle, long = (forecast.outlook(f"p{i}", "s", 10).longest for i in range(3))
    assert short < 40 < middle < 160 < long
    assert forecast.outlook("p0", "s", 10).context == pytest.approx(10 + 20, rel=0.3)
    new = forecast.outlook("unseen", "s", 10)
    assert short < new.longest
    assert forecast.outlook("unseen", "s", 1000).context == pytest.approx(new.context + 990)


def test_history_is_drawn_towards_the_rest_by_its_uncertainty():
    forecast = LengthForecast(4)
    told(forecast, random.Random(1), {f"p{i}": ("s", 100.0 * math.exp(0.3 * (i % 5 - 2))) for i in range(100)}, 1.0, 8)
    forecast.finished("lucky", "s", 1)
    assert forecast.outlook("lucky", "s", 0).longest > 30


def test_prompts_that_do_not_differ_are_forecast_alike():
    forecast = LengthForecast(4)
    rng = random.Random(2)
    told(forecast, rng, {f"p{i}": ("s", 100.0) for i in range(500)}, 0.8, 4)
    seen = [forecast.outlook(f"p{i}", "s", 0).longest for i in range(500)]
    assert max(seen) / min(seen) < 1.6


def test_a_new_prompt_is_forecast_by_its_source_and_a_new_source_by_all():
    forecast = LengthForecast(4)
    rng = random.Random(3)
    told(forecast, rng, {f"a{i}": ("short", 20.0) for i in range(50)}, 0.3, 4)
    told(forecast, rng, {f"b{i}": ("long", 500.0) for i in range(50)}, 0.3, 4)
    short, long, other = (forecast.outlook("new", source, 0).longest for source in ("short", "long", "other"))
    assert short < 60 < other
    assert long > 300
    assert other >= short


@settings(deadline=None)
@given(st.lists(st.integers(1, 500), min_size=20, max_size=200), st.lists(st.integers(1, 500), max_size=50))
def test_the_remainder_of_a_new_prompt_is_the_survival_estimates(lengths, unfinished):
    forecast = LengthForecast(2)
    forecast.unfinished(("s", length) for length in unfinished)
    for number, length in enumerate(lengths):
        forecast.finished(f"once{number}", "s", length)
    expected = kaplan_meier([*lengths, *unfinished], [True] * len(lengths) + [False] * len(unfinished))
    for tokens in (0, 1, 7, 50, 499):
        assert forecast.remaining("new", "s", tokens) == pytest.approx(expected.expected_remaining(tokens), rel=1e-6)


def test_unfinished_responses_make_the_forecast_longer():
    plain, censored = LengthForecast(2), LengthForecast(2)
    censored.unfinished(("s", 400) for _ in range(30))
    for forecast in (plain, censored):
        told(forecast, random.Random(4), {f"p{i}": ("s", 50.0) for i in range(60)}, 0.5, 1)
    assert censored.remaining("new", "s", 60) > 2 * plain.remaining("new", "s", 60)
    assert censored.outlook("new", "s", 0).context > plain.outlook("new", "s", 0).context


def test_it_follows_a_prompt_whose_responses_grow():
    forecast = LengthForecast(4)
    rng = random.Random(5)
    others = {f"p{i}": ("s", 100.0 * math.exp(i % 7 - 3)) for i in range(50)}
    told(forecast, rng, others | {"grows": ("s", 20.0)}, 0.2, 8)
    before = forecast.outlook("grows", "s", 0).longest
    told(forecast, rng, {"grows": ("s", 400.0)}, 0.2, 24)
    assert forecast.outlook("grows", "s", 0).longest > 6 * before


def test_the_longer_a_response_is_the_longer_a_heavy_tail_still_takes():
    forecast = LengthForecast(4)
    told(forecast, random.Random(6), {f"p{i}": ("s", 50.0 * 2 ** (i % 4)) for i in range(80)}, 1.0, 6)
    remaining = [forecast.remaining("p1", "s", tokens) for tokens in (0, 100, 400, 1600, 10**7)]
    assert all(value >= 1 for value in remaining)
    assert remaining[1] < remaining[2] < remaining[3] < remaining[4]


def test_ranks_learned_from_one_epoch_order_the_next():
    forecast = LengthForecast(8)
    rng = random.Random(7)
    medians = {f"p{i}": ("s", math.exp(rng.gauss(4.6, 0.7))) for i in range(200)}
    told(forecast, rng, medians, 0.7, 8)
    predicted = [forecast.outlook(name, "s", 0).longest for name in medians]
    correlation = np.corrcoef(
        np.argsort(np.argsort(predicted)), np.argsort(np.argsort([m for _, m in medians.values()]))
    )
    assert correlation[0, 1] > 0.85
