"""Step metrics: from the batch, and from sums over tokens on all ranks.

lag of a token: the version that the trainer holds when the step starts, minus the version that wrote it. Two shares of
trained tokens are called off-policy: `off_policy/token_share`, written by an older version than the trainer holds, and
`off_policy/resumed_token_share`, written by an older version than the last token of their own sample, which is what
partial rollouts alone add. Importance weights are those before cap and band. What has no value in a step (a mean over
nothing) is left out.
"""

import math

import numpy as np
import numpy.typing as npt
from torch import Tensor

from protocol.batch import Batch
from protocol.states import FinishReason
from trainer.objective import MAX_NAMES, SUM_NAMES
from trainer.off_policy import BUCKET_STARTS, LAG_BUCKETS
from trainer.overlong import is_without_spread
from trainer.packing import trainable_tokens
from trainer.summary import Totals


def token_metrics(sums: Tensor, maxima: Tensor) -> dict[str, float]:
    """Means over tokens from sums of all ranks, in the order of SUM_NAMES and MAX_NAMES."""
    total: dict[str, float] = dict(zip(SUM_NAMES, sums.tolist(), strict=True))
    largest: dict[str, float] = dict(zip(MAX_NAMES, maxima.tolist(), strict=True))
    count = total["tokens"] or math.nan
    metrics = {
        "actor/pg_loss": total["policy_loss"] / count,
        "actor/pg_clipfrac": total["clipped"] / count,
        "actor/pg_clipfrac_lower": total["dual_clipped"] / count,
        "actor/ppo_kl": total["drift"] / count,
        "actor/entropy": total["entropy"] / count,
        "actor/kl_reference": total["kl_reference"] / count,
        "importance/mean": total["weights"] / count,
        "importance/max": largest["largest_weight"],
        "importance/clipped_share": total["cut_weights"] / count,
        "importance/left_out_share": total["left_out"] / count,
        "importance/not_finite_share": total["not_finite"] / count,
        "importance/ess": _effective_share(total["weights"], total["squared_weights"], count),
        "off_policy/kl_behaviour_proximal": total["k3_kl"] / count,
        "off_policy/kl_behaviour_proximal_k1": total["kl"] / count,
        "off_policy/chi2_token": total["squared_ratios"] / count - 1,
    }
    return metrics | _sample_metrics(total, largest) | _lag_metrics(total, largest)


def _sample_metrics(total: dict[str, float], largest: dict[str, float]) -> dict[str, float]:
    count = total["samples"] or math.nan
    named = ("training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl")
    named = (*named, "log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio")
    metrics = {f"off_policy/{name}": total[name] / count for name in named}
    return metrics | {
        "off_policy/chi2_sequence": total["squared_sequence_ratios"] / count - 1,
        "off_policy/log_ppl_diff_max": largest["largest_log_ppl_diff"] if count > 0 else math.nan,
        "off_policy/log_ppl_diff_min": -largest["negated_smallest_log_ppl_diff"] if count > 0 else math.nan,
    }


def _lag_metrics(total: dict[str, float], largest: dict[str, float]) -> dict[str, float]:
    """By lag: what the mismatch of numerics is at lag 0, and what the policy's own drift adds above."""
    metrics: dict[str, float] = {}
    for _, bucket in LAG_BUCKETS:
        tokens = total[f"tokens_lag_{bucket}"] or math.nan
        weights, squares = total[f"weights_lag_{bucket}"], total[f"squared_weights_lag_{bucket}"]
        metrics[f"importance_by_lag/ess_{bucket}"] = _effective_share(weights, squares, tokens)
        metrics[f"importance_by_lag/clipped_share_{bucket}"] = total[f"cut_weights_lag_{bucket}"] / tokens
        metrics[f"mismatch_by_lag/mean_{bucket}"] = total[f"mismatch_lag_{bucket}"] / tokens
    drifted = sum(total[f"tokens_lag_{bucket}"] for start, bucket in LAG_BUCKETS if start) or math.nan
    drift = sum(total[f"mismatch_lag_{bucket}"] for start, bucket in LAG_BUCKETS if start)
    return metrics | {
        "mismatch/lag0_mean": metrics["mismatch_by_lag/mean_0"],
        "mismatch/lag0_max": largest["lag0_largest_mismatch"] if total["tokens_lag_0"] > 0 else math.nan,
        "mismatch/drift_mean": drift / drifted,
        "mismatch/drift_max": largest["largest_drift"] if drifted > 0 else math.nan,
    }


def _effective_share(total: float, squares: float, count: float) -> float:
    """Kish's effective sample size over the number: (sum w)² / (n · sum w²); 1 is on-policy."""
    return total**2 / (count * (squares or math.nan))


def update_metrics(batch: Batch, penalties: npt.NDArray[np.float64], keep: npt.NDArray[np.bool_]) -> dict[str, float]:
    """What became of the rewards of `batch`: `penalties` [S] added to them, and which samples are kept [S]."""
    if not batch.num_samples:
        return {}
    truncated = np.asarray([s.finish_reason is FinishReason.LENGTH for s in batch.header.samples], dtype=bool)
    return {
        "reward/overlong_penalty": float(penalties.mean()),
        "reward/overlong_share": float((penalties < 0).mean()),
        "response/truncated_share": float(truncated.mean()),
        "samples/left_out": float((~keep).sum()),
    }


def token_lags(batch: Batch, held_version: int) -> npt.NDArray[np.int64]:
    """Lag of every trained token."""
    return held_version - batch.versions[trainable_tokens(batch)].astype(np.int64)


def resumed_tokens(batch: Batch) -> npt.NDArray[np.bool_]:
    """Of every trained token, whether an older version wrote it than the last token of its sample."""
    last = np.repeat(batch.versions[batch.sample_offsets[1:] - 1], np.diff(batch.sample_offsets))
    trained = trainable_tokens(batch)
    return batch.versions[trained] < last[trained]


def lag_histogram(lags: npt.NDArray[np.int64]) -> dict[str, float]:
    """Share of the trained tokens in each lag bucket; they add up to 1."""
    buckets = np.searchsorted(BUCKET_STARTS, np.maximum(lags, 0), side="right") - 1
    counted = np.bincount(buckets, minlength=len(LAG_BUCKETS))
    return {f"lag/share_{name}": counted[i] / len(lags) for i, (_, name) in enumerate(LAG_BUCKETS)}


@np.errstate(invalid="ignore")  # the mean of +inf and -inf has no value: `finite` leaves it out
def batch_metrics(batch: Batch, held_version: int) -> dict[str, float]:
    """Rewards, lengths and lags of one batch."""
    lags = token_lags(batch, held_version)
    lengths = np.diff(batch.sample_offsets) - batch.prompt_lengths
    samples = batch.header.samples
    if not samples:
        return {"samples/trained": 0.0, "tokens/trained": 0.0}
    stopped = np.asarray([s.finish_reason is FinishReason.STOP for s in samples])
    groups = [batch.rewards[batch.group_index == g] for g in np.unique(batch.group_index)]
    metrics = {
        "reward/mean": batch.rewards.mean(),
        "reward/max": batch.rewards.max(),
        "reward/min": batch.rewards.min(),
        "reward/groups_without_spread": np.mean([is_without_spread(g) for g in groups]),
        # A reward that rises while responses stop ending is the commonest false success: report both together.
        "reward/rewarded_and_stopped": np.mean(stopped & (batch.rewards > 0)),
        "response/stopped_share": stopped.mean(),
        "response/length_mean": lengths.mean(),
        "response/length_p50": np.percentile(lengths, 50),
        "response/length_p99": np.percentile(lengths, 99),
        "response/length_max": lengths.max(),
        "samples/trained": len(samples),
        "samples/failed": sum(len(g.failed) for g in batch.header.groups),
        "samples/resumed": sum(s.num_resumes > 0 for s in samples),
        "samples/multi_version": sum(_num_versions(batch, i) > 1 for i in range(len(samples))),
        "tokens/trained": len(lags),
        "lag/mean": lags.mean() if len(lags) else 0,
        "lag/max": lags.max(initial=0),
        "off_policy/token_share": np.mean(lags > 0) if len(lags) else 0,
        "off_policy/resumed_token_share": np.mean(resumed_tokens(batch)) if len(lags) else 0,
    } | (lag_histogram(lags) if len(lags) else {})
    parts: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.reward_parts.items():
            parts.setdefault(name, []).append(value)
    metrics |= {f"reward_parts/{name}": np.mean(values) for name, values in parts.items()}
    return {name: float(value) for name, value in metrics.items()}


def add_to_totals(totals: Totals, batch: Batch, held_version: int, metrics: dict[str, float]) -> None:
    """Count one trained batch."""
    lags = token_lags(batch, held_version)
    totals.steps += 1
    totals.samples_trained += batch.num_samples
    totals.groups_consumed += len(batch.header.groups)
    totals.samples_resumed += int(metrics.get("samples/resumed", 0))
    totals.samples_multi_version += int(metrics.get("samples/multi_version", 0))
    totals.tokens_trained += len(lags)
    totals.off_policy_tokens += int((lags > 0).sum())
    totals.lag_sum += int(lags.sum())
    totals.max_lag = max(totals.max_lag, int(lags.max(initial=0)))


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """Without what has no value: JSON has no NaN."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _num_versions(batch: Batch, sample: int) -> int:
    return len({segment.version for segment in batch.header.samples[sample].segments})
