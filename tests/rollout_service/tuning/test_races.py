"""Races of samples: what must hold whatever the lengths are."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.tuning.races import lognormal_prompts, simulate_races


def constant(length):
    return lambda: length


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), wanted=st.integers(1, 6), goes_on=st.booleans(), sigma=st.floats(0.1, 1.5))
def test_without_over_provisioning_nothing_is_biased_or_lost(seed, wanted, goes_on, sigma):
    result = simulate_races(lognormal_prompts(20, 100, 0.3, sigma, seed), wanted, wanted, 3, goes_on)
    assert result.trained_tokens == result.started_tokens
    assert result.lost_share == 0


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), wanted=st.integers(1, 6), more=st.integers(1, 6))
def test_the_fastest_are_shorter_and_sooner(seed, wanted, more):
    alone, raced = (
        simulate_races(lognormal_prompts(300, 100, 0.3, 1.0, seed), wanted, started, 1, goes_on=False)
        for started in (wanted, wanted + more)
    )
    assert raced.trained_tokens < raced.started_tokens
    assert raced.mean_wait < alone.mean_wait
    assert 0 < raced.lost_share < 1


def test_what_goes_on_is_trained_in_the_end_so_the_bias_fades():
    biases = []
    for num_epochs in (1, 4, 64):
        result = simulate_races(lognormal_prompts(100, 200, 0.3, 0.8, 7), 4, 6, num_epochs, goes_on=True)
        biases.append(result.trained_tokens / result.started_tokens)
        assert result.lost_share == 0
    assert biases[0] < 0.8 < biases[1] < biases[2]
    assert biases[2] == pytest.approx(1, abs=0.05)


def test_equal_lengths_leave_nothing_to_win():
    result = simulate_races([constant(10)] * 3, 2, 4, 1, goes_on=False)
    assert (result.trained_tokens, result.started_tokens, result.mean_wait) == (10, 10, 10)
    assert result.lost_share == 0.5
