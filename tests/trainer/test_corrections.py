"""Weights and masks by level, the interpolated proximal policy, and what the metrics say of it all."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.trainer.factory import make_batch
from trainer.corrections import Corrector, Rejection, interpolated_proximal
from trainer.metrics import batch_metrics, lag_histogram, resumed_tokens, token_metrics
from trainer.objective import MAX_NAMES, OWN_SUMS, SUM_NAMES
from trainer.off_policy import LAG_BUCKETS, lag_bucket, off_policy_sums
from trainer.packing import pack, trainable_tokens
from trainer.spans import make_spans

UNTIMED = hypothesis_settings(deadline=None)  # the machine may be busy

SAMPLES = torch.tensor([4, 4, 4, 4, 7, 7, 9])
VERSIONS = torch.tensor([1, 1, 2, 1, 1, 1, 1], dtype=torch.int32)
LOG_RATIO = torch.tensor([0.1, 0.3, -0.5, 1.0, 0.2, 0.4, -0.7], dtype=torch.float64)
ZEROS = torch.zeros(7, dtype=torch.float64)


def weigh(log_ratio: torch.Tensor = LOG_RATIO, **settings: Any) -> Any:
    return Corrector(**settings).weigh(log_ratio, torch.zeros_like(log_ratio), SAMPLES, VERSIONS)


def test_spans_of_a_resumed_sample() -> None:
    """A version that comes back after another one makes a new run; a new sample does so with the same version."""
    assert make_spans(SAMPLES, VERSIONS, "token").ids.tolist() == list(range(7))
    assert make_spans(SAMPLES, VERSIONS, "version_run").ids.tolist() == [0, 0, 1, 2, 3, 3, 4]
    assert make_spans(SAMPLES, VERSIONS, "sequence").ids.tolist() == [0, 0, 0, 0, 1, 1, 2]
    nothing = make_spans(SAMPLES[:0], VERSIONS[:0], "version_run")
    assert nothing.sums(ZEROS[:0]).tolist() == []


@UNTIMED
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), max_size=12))
def test_version_runs_of_packed_batches_are_their_segments(shape: list[tuple[int, int]]) -> None:
    """Runs as the batch's own header has them: segments of one sample, joined where the version is the same."""
    samples = torch.tensor([i for i, (n, _) in enumerate(shape) for _ in range(n)], dtype=torch.int64) // 2
    versions = torch.tensor([v for n, v in shape for _ in range(n)], dtype=torch.int32)
    expected = 0
    for i, (_, version) in enumerate(shape):
        expected += i % 2 == 0 or version != shape[i - 1][1]
    assert len(make_spans(samples, versions, "version_run").sizes) == expected


def test_version_runs_of_a_batch() -> None:
    batch = make_batch(version=3)
    micro = pack(batch, range(batch.num_samples))
    runs = make_spans(micro.samples, micro.versions, "version_run")
    assert len(runs.sizes) == sum(len(sample.segments) for sample in batch.header.samples)


def test_weights_by_level() -> None:
    token = weigh()
    torch.testing.assert_close(token.weight, LOG_RATIO.exp())
    run = weigh(level="version_run")
    torch.testing.assert_close(run.weight.log(), torch.tensor([0.4, 0.4, -0.5, 1.0, 0.6, 0.6, -0.7]).double())
    sequence = weigh(level="sequence")
    torch.testing.assert_close(sequence.weight.log(), torch.tensor([0.9] * 4 + [0.6] * 2 + [-0.7]).double())
    geometric = weigh(level="sequence", geometric=True)
    torch.testing.assert_close(geometric.weight.log(), torch.tensor([0.225] * 4 + [0.3] * 2 + [-0.7]).double())
    assert (token.num_weights, run.num_weights, sequence.num_weights) == (7, 5, 3)
    assert float(sequence.total) == pytest.approx(math.exp(0.9) + math.exp(0.6) + math.exp(-0.7))


def test_cap_and_band() -> None:
    capped = weigh(cap=1.5)
    assert capped.weight.max() == 1.5
    assert capped.cut.tolist() == [False, False, False, True, False, False, False]
    assert float(capped.raw.max()) == pytest.approx(math.e)
    banded = weigh(band=(0.55, 1.5))
    assert (banded.weight == 0).tolist() == [False, False, False, True, False, False, True]
    assert banded.keep.all(), "a band is a weight of zero, not a mask"


@pytest.mark.parametrize(
    ("rejection", "left_out"),
    [
        (Rejection("k1", "token", "mean", 0.0, 1.5), [2, 3, 6]),  # the log of 1.5 is 0.405
        (Rejection("k1", "version_run", "sum", 0.0, 1.5), [2, 3, 4, 5, 6]),
        (Rejection("k1", "sequence", "mean", 0.0, 1.3), [4, 5, 6]),
        (Rejection("k1", "sequence", "mean", 0.4, 1.3), [4, 5]),
        (Rejection("k2", "sequence", "max", 0.0, 0.3), [0, 1, 2, 3]),
        (Rejection("k2", "token", "mean", 0.0, 0.2), [3, 6]),
        (Rejection("k3", "version_run", "sum", 0.0, 0.15), [3, 6]),
    ],
)
def test_rejection_by_hand(rejection: Rejection, left_out: list[int]) -> None:
    weights = weigh(rejection=rejection)
    assert (~weights.keep).nonzero()[:, 0].tolist() == left_out


def test_a_veto_takes_the_whole_sample() -> None:
    assert (~weigh(veto=0.61).keep).nonzero()[:, 0].tolist() == [0, 1, 2, 3, 6]
    assert weigh(veto=0.4).keep.all()


@pytest.mark.parametrize("level", ["token", "version_run", "sequence"])
def test_what_is_not_finite(level: Any) -> None:
    """A broken behaviour log-prob is left out and stays out of its span's weight; a broken policy is not hidden."""
    behaviour = ZEROS.clone()
    behaviour[1] = math.nan
    weights = Corrector(level=level, rejection=Rejection("k3", "sequence", "max", 0.0, 1e6), veto=0.1).weigh(
        LOG_RATIO, behaviour, SAMPLES, VERSIONS
    )
    assert weights.weight.isfinite().all()
    assert (~weights.keep).nonzero()[:, 0].tolist() == [1]
    broken = LOG_RATIO.clone()
    broken[1] = math.nan
    weights = Corrector(level=level, rejection=Rejection("k3", "token", "mean", 0.0, 1e6), veto=0.1).weigh(
        broken, ZEROS, SAMPLES, VERSIONS
    )
    assert weights.keep[1]
    assert weights.weight[1].isnan()


def test_the_interpolated_proximal_is_between_the_writer_and_now() -> None:
    current, behaviour = LOG_RATIO.clone().requires_grad_(), ZEROS
    versions = torch.tensor([5, 4, 3, 1, 5, 4, 3])
    assert torch.equal(interpolated_proximal(current, behaviour, versions, 5, 0.0), LOG_RATIO), (
        "before the first update"
    )
    half = interpolated_proximal(current, behaviour, versions, 5, 0.5)
    alpha = torch.tensor([0, 1 / 1.5, 2 / 2.5, 4 / 4.5, 0, 1 / 1.5, 2 / 2.5]).double()
    torch.testing.assert_close(half, alpha * LOG_RATIO)
    assert not half.requires_grad
    behaviour = behaviour.clone()
    behaviour[0] = -math.inf
    assert interpolated_proximal(current, behaviour, versions, 5, 0.5).isfinite().all()


def test_on_a_straight_path_of_logprobs_it_is_exact() -> None:
    """Where log-probs move by the same amount with every version, interpolation finds the proximal ones exactly."""
    slope, held, progress = 0.1, 7, 0.25
    versions = torch.tensor([7, 6, 4, 0])
    at = lambda version: -2.0 + slope * version  # noqa: E731
    behaviour = torch.tensor([at(int(v)) for v in versions], dtype=torch.float64)
    now = torch.full((4,), at(held + progress), dtype=torch.float64)
    proximal = interpolated_proximal(now, behaviour, versions, held, progress)
    torch.testing.assert_close(proximal, torch.full((4,), at(held), dtype=torch.float64))


def test_lag_buckets_cover_every_lag_once() -> None:
    lags = torch.tensor([-1, 0, 1, 2, 3, 4, 5, 8, 9, 100])
    assert [LAG_BUCKETS[i][1] for i in lag_bucket(lags)] == [
        "0",
        "0",
        "1",
        "2",
        "3_4",
        "3_4",
        "5_8",
        "5_8",
        "9_up",
        "9_up",
    ]
    histogram = lag_histogram(lags.numpy().astype(np.int64))
    assert sum(histogram.values()) == pytest.approx(1)
    assert histogram["lag/share_5_8"] == 0.2


def test_two_shares_of_off_policy_tokens() -> None:
    """Older than the trainer's version; older than the last token of their own sample, as only resumed samples have."""
    batch = make_batch(version=3)
    metrics = batch_metrics(batch, held_version=3)
    versions = batch.versions[trainable_tokens(batch)]
    assert metrics["off_policy/token_share"] == pytest.approx(np.mean(versions < 3))
    assert metrics["off_policy/resumed_token_share"] == pytest.approx(np.mean(versions < 3))
    later = batch_metrics(batch, held_version=4)
    assert later["off_policy/token_share"] == 1
    assert later["off_policy/resumed_token_share"] == metrics["off_policy/resumed_token_share"]
    assert 0 < resumed_tokens(batch).sum() < len(versions)


def metrics_of(proximal: torch.Tensor, behaviour: torch.Tensor, lags: torch.Tensor) -> dict[str, float]:
    weights = Corrector(cap=2.0).weigh(proximal, behaviour, SAMPLES, VERSIONS)
    sums, maxima = off_policy_sums(proximal, behaviour, weights, lags, make_spans(SAMPLES, VERSIONS, "sequence"))
    own = dict.fromkeys(OWN_SUMS, torch.zeros(())) | {"tokens": torch.tensor(7.0)}
    named = sums | own
    return token_metrics(
        torch.stack([named[n].double() for n in SUM_NAMES]), torch.stack([maxima[n].double() for n in MAX_NAMES])
    )


def test_numerics_and_drift_are_told_apart() -> None:
    """The mismatch of tokens of lag 0 is the engine's numerics; that of older ones is the policy's change."""
    lags = torch.tensor([3, 3, 2, 3, 0, 0, 1])
    metrics = metrics_of(LOG_RATIO, ZEROS, lags)
    assert metrics["mismatch/lag0_mean"] == pytest.approx(0.3)
    assert metrics["mismatch/lag0_max"] == pytest.approx(0.4)
    assert metrics["mismatch/drift_mean"] == pytest.approx((0.1 + 0.3 + 0.5 + 1.0 + 0.7) / 5)
    assert metrics["mismatch/drift_max"] == pytest.approx(1.0)
    assert metrics["mismatch_by_lag/mean_3_4"] == pytest.approx((0.1 + 0.3 + 1.0) / 3)
    assert metrics["importance_by_lag/clipped_share_3_4"] == pytest.approx(1 / 3)
    assert metrics["importance_by_lag/clipped_share_0"] == 0
    assert metrics["importance_by_lag/ess_2"] == pytest.approx(1), "one token is as good as itself"
    w = LOG_RATIO[[0, 1, 3]].exp()
    assert metrics["importance_by_lag/ess_3_4"] == pytest.approx(float(w.sum() ** 2 / (3 * w.square().sum())))
    assert math.isnan(metrics["importance_by_lag/ess_9_up"])


def test_on_policy_metrics_are_at_their_neutral_values() -> None:
    metrics = metrics_of(LOG_RATIO, LOG_RATIO, torch.zeros(7, dtype=torch.int64))
    for name in ("importance/mean", "importance/max", "importance/ess", "off_policy/ppl_ratio"):
        assert metrics[name] == pytest.approx(1)
    for name in ("chi2_token", "chi2_sequence", "kl_behaviour_proximal", "kl_behaviour_proximal_k1", "log_ppl_diff"):
        assert metrics[f"off_policy/{name}"] == pytest.approx(0, abs=1e-12)
    assert math.isnan(metrics["mismatch/drift_mean"]), "nothing is older than the trainer"


BROKEN = torch.tensor([math.nan, -1.0, -1.0, -math.inf], dtype=torch.float64)
ONE_SAMPLE = torch.zeros(4, dtype=torch.int64)


def test_a_geometric_mean_is_of_the_usable_tokens() -> None:
    ours = torch.full((4,), -3.0, dtype=torch.float64)
    weights = Corrector("sequence", geometric=True).weigh(ours, BROKEN, ONE_SAMPLE, ONE_SAMPLE)
    torch.testing.assert_close(weights.raw.log(), torch.full((4,), -2.0).double())
    assert weights.keep.tolist() == [False, True, True, False]
    nothing = Corrector("sequence", geometric=True).weigh(ours, BROKEN * math.nan, ONE_SAMPLE, ONE_SAMPLE)
    assert nothing.raw.tolist() == [1.0] * 4
    assert not nothing.keep.any()


@pytest.mark.parametrize(("estimator", "upper"), [("k1", 6.0), ("k2", 1.5), ("k3", 4.0)])
def test_a_mean_that_rejects_is_of_the_usable_tokens(estimator: Any, upper: float) -> None:
    """The log-ratio is 2 on both: k2 is 2, k3 is 4.4; over all four tokens each would be half of it."""
    rejection = Rejection(estimator, "sequence", "mean", 0.1, upper)
    ours = torch.full((4,), 1.0, dtype=torch.float64)
    assert not Corrector(rejection=rejection).weigh(ours, BROKEN, ONE_SAMPLE, ONE_SAMPLE).keep.any()


def test_metrics_of_samples_are_of_the_usable_tokens() -> None:
    ours = torch.full((4,), -3.0, dtype=torch.float64)
    weights = Corrector().weigh(ours, BROKEN, ONE_SAMPLE, ONE_SAMPLE)
    spans = make_spans(ONE_SAMPLE, ONE_SAMPLE, "sequence")
    sums, _ = off_policy_sums(ours, BROKEN, weights, ONE_SAMPLE, spans)
    assert sums["log_ppl_diff"] == 2.0
    assert sums["rollout_log_ppl"] == 1.0
    assert sums["samples"] == 1.0
