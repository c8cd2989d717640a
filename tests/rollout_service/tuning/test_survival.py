"""The survival estimate against a published example, against counting, and its properties."""

import math

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
