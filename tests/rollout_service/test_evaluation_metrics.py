"""mean@k, pass@k and maj@k, against their definitions."""

from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.evaluation_metrics import (
    MAX_SOURCES,
    PromptResults,
    SampleResult,
    majority_reward,
    pass_at,
    score,
    score_by_source,
)


def results(*rewards, source="s", answers=None, num_failed=0, lengths=None, truncated=()):
    answers = answers or [None] * len(rewards)
    lengths = lengths or [1] * len(rewards)
    samples = [
        SampleResult(reward, length, i in truncated, answer)
        for i, (reward, length, answer) in enumerate(zip(rewards, lengths, answers, strict=True))
    ]
    return PromptResults(source, samples, num_failed)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_is_the_share_of_subsets_with_a_pass(passed, data):
    j = data.draw(st.integers(1, len(passed)))
    exact = fmean(any(subset) for subset in combinations(passed, j))
    assert pass_at(len(passed), sum(passed), j) == pytest.approx(exact)


def test_pass_at_is_unbiased():
    """Over all outcomes of 4 samples that pass with p = 0.3, its mean is 1 − 0.7^j."""
    for j in range(1, 5):
        mean = sum(
            0.3 ** sum(bits) * 0.7 ** (4 - sum(bits)) * pass_at(4, sum(bits), j)
            for bits in ([(n >> i) & 1 for i in range(4)] for n in range(16))
        )
        assert mean == pytest.approx(1 - 0.7**j)


def test_pass_at_of_many_samples_is_finite():
    assert pass_at(1024, 1, 512) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("rewards", "answers", "expected"),
    [
        ([1, 1, 0], [7, 7, 5], 1),
        ([1, 0, 0], [7, 5, 5], 0),
        ([1, 0], [7, 5], 0.5),  # a tie is the mean of what ties
        ([1, 0, 0, 0], [7, None, None, None], 1),  # no answer, no vote
        ([0, 0.5], [None, None], 0.25),
        ([1, 0, 0], [7, 7, 5], 0.5),  # the same answer, of which one response was cut off and counts nothing
    ],
)
def test_majorities(rewards, answers, expected):
    assert majority_reward(results(*rewards, answers=answers).samples) == expected


def test_scores_of_prompts():
    prompts = [
        results(1, 1, 0, 0, answers=[1, 1, 2, 3], lengths=[10, 20, 30, 40], truncated=[3]),
        results(0, 0, 0, 1, answers=[4, 4, 5, 6], lengths=[1, 1, 1, 1]),
    ]
    scores = score(prompts, 4, 1.0)
    assert scores is not None
    assert (scores.num_prompts, scores.num_samples, scores.num_failed) == (2, 8, 0)
    assert scores.mean == pytest.approx((0.5 + 0.25) / 2)
    assert scores.mean_stderr == pytest.approx(0.125)
    assert scores.pass_at == pytest.approx({1: 0.375, 2: (5 / 6 + 1 / 2) / 2, 4: 1.0})
    assert scores.majority == 0.5
    assert scores.truncated_share == 1 / 8
    assert (scores.mean_tokens, scores.p50_tokens, scores.max_tokens) == (13, 5.5, 40)


def test_failed_samples_are_no_zeros():
    prompts = [results(1, 1, num_failed=2), results(num_failed=4), results(0, 1, 1, 1)]
    scores = score(prompts, 4, 1.0)
    assert scores is not None
    assert (scores.num_prompts, scores.num_samples, scores.num_failed) == (2, 6, 6)
    assert scores.mean == pytest.approx((1 + 0.75) / 2)
    assert scores.pass_at == pytest.approx({1: 0.875, 2: 1.0, 4: 1.0}), "pass@4 is of the one prompt that has 4"
    assert score([results(num_failed=4)], 4, 1.0) is None
    assert score([], 1, 1.0) is None


def test_partial_credit_passes_from_a_threshold_on():
    assert score([results(0.4, 0.6)], 2, 0.5).pass_at == {1: 0.5, 2: 1.0}
    assert score([results(0.4, 0.6)], 2, 1.0).pass_at == {1: 0.0, 2: 0.0}


def test_one_sample_has_no_majority_and_one_prompt_no_error():
    scores = score([results(1, answers=[3])], 1, 1.0)
    assert (scores.majority, scores.mean_stderr, scores.pass_at) == (None, None, {1: 1.0})


def test_sources_whose_answers_are_unknown_take_no_part_in_the_majority():
    prompts = [results(1, 0, 0, source="known", answers=[1, 2, 2]), results(1, 1, 1, source="unknown")]
    assert score(prompts, 3, 1.0).majority == 0
    by_source = score_by_source(prompts, 3, 1.0)
    assert (by_source["known"].majority, by_source["unknown"].majority) == (0, None)
    assert by_source["unknown"].mean == 1


def test_other_powers_of_two_and_k_itself():
    assert list(score([results(*[0] * 6)], 6, 1.0).pass_at) == [1, 2, 4, 6]


def test_many_sources_are_bounded():
    prompts = [results(i % 2, source=f"s{i:03}") for i in range(MAX_SOURCES + 8)]
    by_source = score_by_source(prompts, 1, 1.0)
    assert len(by_source) == MAX_SOURCES
    assert by_source["other"].num_prompts == 9
    assert sum(scores.num_prompts for scores in by_source.values()) == len(prompts)
    assert len(score_by_source(prompts[:MAX_SOURCES], 1, 1.0)) == MAX_SOURCES
    assert "other" not in score_by_source(prompts[:MAX_SOURCES], 1, 1.0)
