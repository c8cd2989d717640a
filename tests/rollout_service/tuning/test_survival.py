"""The survival estimate against a published example, against counting, and its properties."""

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import DataError
from rollout_service.tuning.survival import kaplan_meier

# Remission of leukaemia under 6-mercaptopurine, in weeks (Freireich et al., Blood 21, 1963); False: still in remission.
REMISSION = [6, 6, 6, 6, 7, 9, 10, 10, 11, 13, 16, 17, 19, 20, 22, 23, 25, 32, 32, 34, 35]
RELAPSED = [1, 1, 1, 0, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
PUBLISHED = {6: 0.857, 7: 0.807, 10: 0.753, 13: 0.690, 16: 0.627, 22: 0.538, 23: 0.448}
PUBLISHED_ERROR = {6: 0.0764, 7: 0.0869, 10: 0.0963, 13: 0.1068, 16: 0.1141, 22: 0.1282, 23: 0.1346}

observations = st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=60).filter(
    lambda pairs: any(finished for _, finished in pairs)
)


def test_published_example() -> None:
    found = kaplan_meier(REMISSION, [bool(r) for r in RELAPSED])
    assert dict(zip(found.lengths.tolist(), found.survival.round(3).tolist(), strict=True)) == PUBLISHED
    for length, error in PUBLISHED_ERROR.items():
        index = found.lengths.tolist().index(length)
        s = found.survival[index]
        width = 1.959964 * error / (s * abs(math.log(s)))  # Greenwood's error on the log(-log) scale
        assert found.lower[index] == pytest.approx(s ** math.exp(width), abs=2e-3)
        assert found.upper[index] == pytest.approx(s ** math.exp(-width), abs=2e-3)
    assert found.quantile(0.5) == 23
    assert found.quantile(0.9) is None, "more than a tenth never relapsed"


@given(observations)
def test_it_is_the_product_of_the_shares_that_go_on(pairs: list[tuple[int, bool]]) -> None:
    lengths, finished = [p[0] for p in pairs], [p[1] for p in pairs]
    found = kaplan_meier(lengths, finished)
    for tokens in range(max(lengths) + 2):
        expected = 1.0
        for u in range(tokens + 1):
            at_risk = sum(length >= u for length in lengths)
            ended = sum(length == u and done for length, done in pairs)
            expected *= 1 - ended / at_risk if at_risk else 1.0
        assert found.at(tokens) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=80))
def test_without_censoring_it_counts(lengths: list[int]) -> None:
    found = kaplan_meier(lengths, [True] * len(lengths))
    assert found.mean() == pytest.approx(np.mean(lengths))
    for tokens in (0, 1, 50, 499):
        assert found.at(tokens) == pytest.approx(np.mean(np.array(lengths) > tokens), abs=1e-12)
    alive = [length for length in lengths if length > 50]
    if alive:
        assert found.expected_remaining(50) == pytest.approx(max(1.0, np.mean(alive) - 50))


@given(observations)
def test_bands_hold_the_estimate_and_all_fall(pairs: list[tuple[int, bool]]) -> None:
    found = kaplan_meier([p[0] for p in pairs], [p[1] for p in pairs])
    assert (found.lower <= found.survival + 1e-12).all()
    assert (found.survival <= found.upper + 1e-12).all()
    assert ((found.lower >= 0) & (found.upper <= 1)).all()
    assert (np.diff(found.survival) <= 1e-12).all()
    assert found.mean() >= np.mean([length for length, _ in pairs]) - 1e-9, "unfinished ones can only lengthen it"


def dense_variance(lengths, finished, prompts, at) -> float:
    """The variance of log S(at), from each sample's influence as the derivative of log S by the sample's weight."""

    def log_survival(weights: np.ndarray) -> float:
        total = 0.0
        for u in sorted({x for x, done in zip(lengths, finished, strict=True) if done and x <= at}):
            risk = sum(w for w, x in zip(weights, lengths, strict=True) if x >= u)
            died = sum(w for w, x, done in zip(weights, lengths, finished, strict=True) if done and x == u)
            total += math.log(1 - died / risk)
        return total

    step, sums = 1e-5, {}
    for index, prompt in enumerate(prompts):
        more, less = np.ones(len(lengths)), np.ones(len(lengths))
        more[index], less[index] = 1 + step, 1 - step
        sums[prompt] = sums.get(prompt, 0.0) + (log_survival(more) - log_survival(less)) / (2 * step)
    return sum(value**2 for value in sums.values())


def variance_of(found, index: int) -> float:
    """The variance of log S that a band was made of."""
    s = found.survival[index]
    return (math.log(math.log(found.lower[index]) / math.log(s)) * math.log(s) / 1.959964) ** 2


@given(observations)
def test_bands_by_prompt_are_greenwoods_if_each_has_one_sample(pairs: list[tuple[int, bool]]) -> None:
    lengths, finished = [p[0] for p in pairs], [p[1] for p in pairs]
    alone, each = kaplan_meier(lengths, finished), kaplan_meier(lengths, finished, list(range(len(lengths))))
    np.testing.assert_allclose(each.lower, alone.lower, atol=1e-9)
    np.testing.assert_allclose(each.upper, alone.upper, atol=1e-9)


@given(st.lists(st.tuples(st.integers(1, 12), st.booleans(), st.integers(0, 4)), min_size=3, max_size=25))
def test_bands_by_prompt_are_the_squared_influences_of_prompts(rows: list[tuple[int, bool, int]]) -> None:
    lengths, finished, prompts = [r[0] for r in rows], [r[1] for r in rows], [f"p{r[2]}" for r in rows]
    if not any(finished):
        return
    found = kaplan_meier(lengths, finished, prompts)
    for index, length in enumerate(found.lengths.tolist()):
        if 0 < found.survival[index] < 1 and found.lower[index] > 1e-300:
            expected = dense_variance(lengths, finished, prompts, length)
            assert variance_of(found, index) == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_bands_by_prompt_cover_where_samples_of_a_prompt_are_alike() -> None:
    rng = np.random.default_rng(1)
    exact = math.exp(5)
    hits = {"alone": 0, "by prompt": 0}
    for _ in range(200):
        levels = rng.normal(5, 0.9, 60)
        lengths = np.exp(np.repeat(levels, 8) + rng.normal(0, 0.4, 480)).astype(int) + 1
        seen = rng.uniform(50, 1500, 480).astype(int)
        done, prompts = lengths <= seen, np.repeat(np.arange(60), 8).tolist()
        lengths = np.minimum(lengths, seen).tolist()
        for name, of in (("alone", None), ("by prompt", prompts)):
            found = kaplan_meier(lengths, done.tolist(), of)
            index = int(np.searchsorted(found.lengths, exact)) - 1
            hits[name] += bool(found.lower[index] <= 0.5 <= found.upper[index])
    assert hits["alone"] < 0.75 * 200
    assert hits["by prompt"] > 0.9 * 200


def test_bands_of_many_samples_take_no_long_time() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6, 1, 100_000).astype(int) + 1
    began_s = time.process_time()
    kaplan_meier(lengths.tolist(), (rng.random(100_000) < 0.9).tolist(), (np.arange(100_000) // 8).tolist())
    assert time.process_time() - began_s < 2


def test_the_mean_of_finished_ones_is_biased_short_and_this_is_not() -> None:
    rng = np.random.default_rng(0)
    true = rng.lognormal(5, 1, 20_000)
    seen_until = rng.uniform(0, 2000, 20_000)
    lengths, finished = np.minimum(true, seen_until).astype(int) + 1, true <= seen_until
    naive = lengths[finished].mean()
    found = kaplan_meier(lengths.tolist(), finished.tolist())
    exact = np.minimum(true, 2000).mean()
    assert naive < 0.9 * exact
    assert found.mean() == pytest.approx(exact, rel=0.05)


def test_nothing_finished_is_refused() -> None:
    with pytest.raises(DataError, match="no response has finished"):
        kaplan_meier([5, 6], [False, False])
