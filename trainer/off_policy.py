"""How far off-policy a micro-batch is: sums over its tokens and samples that add up over micro-batches and ranks.

With p the proximal and b the behaviour policy, w an importance weight before cap and band (at the level of the
settings), and log-ratios clamped to ±20. What the sums become is in `trainer.metrics`. A token whose behaviour
log-prob is not finite counts as one of ratio 1. All sums are float64.
"""

import torch
from torch import Tensor

from trainer.corrections import MAX_LOG_RATIO, Weights
from trainer.spans import Spans

# A lag is counted in the last bucket that starts at or below it: exact where most tokens are, coarse in the tail.
LAG_BUCKETS: tuple[tuple[int, str], ...] = ((0, "0"), (1, "1"), (2, "2"), (3, "3_4"), (5, "5_8"), (9, "9_up"))
BUCKET_STARTS = tuple(start for start, _ in LAG_BUCKETS)
BUCKET_SUMS = ("tokens", "weights", "squared_weights", "cut_weights", "mismatch")

TOKEN_SUMS = ("left_out", "not_finite", "weights", "squared_weights", "cut_weights", "kl", "k3_kl", "squared_ratios")
SAMPLE_SUMS = (
    "samples",
    "training_ppl",
    "training_log_ppl",
    "rollout_ppl",
    "rollout_log_ppl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "ppl_ratio",
    "squared_sequence_ratios",
)
SUM_NAMES = (
    *TOKEN_SUMS,
    *SAMPLE_SUMS,
    *(f"{name}_lag_{bucket}" for _, bucket in LAG_BUCKETS for name in BUCKET_SUMS),
)
MAX_NAMES = (
    "largest_weight",
    "lag0_largest_mismatch",
    "largest_drift",
    "largest_log_ppl_diff",
    "negated_smallest_log_ppl_diff",
)


def lag_bucket(lags: Tensor) -> Tensor:
    """Index into LAG_BUCKETS of each of `lags` [R]; a lag below zero counts as zero."""
    return torch.bucketize(lags.clamp(min=0), torch.tensor(BUCKET_STARTS, device=lags.device), right=True) - 1


@torch.no_grad()
def off_policy_sums(
    proximal: Tensor, behaviour: Tensor, weights: Weights, lags: Tensor, sequences: Spans
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sums by SUM_NAMES and maxima by MAX_NAMES; log-probs and `lags` [R] of one micro-batch."""
    p = proximal.double()
    b = torch.where(weights.usable, behaviour.double(), p)
    log_ratio = (p - b).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    mismatch = (p - b).abs()
    raw = weights.raw.double()
    token_values = {
        "left_out": ~weights.keep,
        "not_finite": ~weights.usable,
        "weights": raw,
        "squared_weights": raw.square(),
        "cut_weights": weights.cut,
        "kl": b - p,
        "k3_kl": log_ratio.exp() - 1 - log_ratio,
        "squared_ratios": (2 * log_ratio).exp(),
    }
    sums = {name: value.double().sum() for name, value in token_values.items()}
    sample_sums, sample_maxima = _of_samples(p, b, weights.usable, sequences)
    buckets = lag_bucket(lags)
    by_lag = {"tokens": torch.ones_like(raw), "mismatch": mismatch} | {
        name: token_values[name].double() for name in ("weights", "squared_weights", "cut_weights")
    }
    for name, values in by_lag.items():
        counted = raw.new_zeros(len(LAG_BUCKETS)).index_add(0, buckets, values)
        sums |= {f"{name}_lag_{bucket}": counted[i] for i, (_, bucket) in enumerate(LAG_BUCKETS)}
    maxima = {
        "largest_weight": _largest(raw, 0.0),
        "lag0_largest_mismatch": _largest(mismatch[lags <= 0], 0.0),
        "largest_drift": _largest(mismatch[lags > 0], 0.0),
    }
    return sums | sample_sums, maxima | sample_maxima


def _of_samples(p: Tensor, b: Tensor, usable: Tensor, sequences: Spans) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Perplexities and sequence ratios of the `usable` [R]; every sample that has some counts the same."""
    known = sequences.any(usable)  # [K]
    zeros = torch.zeros_like(p)
    mean_p = sequences.means_over(torch.where(usable, p, zeros), usable)[known]
    mean_b = sequences.means_over(torch.where(usable, b, zeros), usable)[known]
    difference = mean_b - mean_p
    log_ratio = sequences.sums(p - b)[known].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    values = {
        "samples": torch.ones_like(mean_p),
        "training_ppl": (-mean_p).exp(),
        "training_log_ppl": -mean_p,
        "rollout_ppl": (-mean_b).exp(),
        "rollout_log_ppl": -mean_b,
        "log_ppl_diff": difference,
        "log_ppl_abs_diff": difference.abs(),
        "ppl_ratio": difference.exp(),
        "squared_sequence_ratios": (2 * log_ratio).exp(),
    }
    maxima = {
        "largest_log_ppl_diff": _largest(difference, -torch.inf),
        "negated_smallest_log_ppl_diff": _largest(-difference, -torch.inf),
    }
    return {name: value.sum() for name, value in values.items()}, maxima


def _largest(values: Tensor, at_least: float) -> Tensor:
    return torch.cat([values, values.new_tensor([at_least])]).max()
