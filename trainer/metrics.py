"""Step metrics: from the batch, and from sums over tokens on all ranks.

lag of a token: the version that the trainer holds when the step starts, minus the version that wrote it. Off-policy
share: trained tokens with lag above zero, over all trained tokens. Importance weights are the untruncated p/b;
`clipped_share` is the share above the cap. What has no value in a step (a mean over nothing) is left out.
"""

import math

import numpy as np
import numpy.typing as npt
from torch import Tensor

from protocol.batch import Batch
from protocol.states import FinishReason
from trainer.objective import MAX_NAMES, SUM_NAMES
from trainer.packing import trainable_tokens
from trainer.summary import Totals


def token_metrics(sums: Tensor, maxima: Tensor) -> dict[str, float]:
    """Means over tokens from sums of all ranks, in the order of SUM_NAMES and MAX_NAMES."""
    total = dict(zip(SUM_NAMES, sums.tolist(), strict=True))
    largest = dict(zip(MAX_NAMES, maxima.tolist(), strict=True))
    count = total["tokens"] or math.nan
    squares = total["squared_weights"] or math.nan
    return {
        "actor/pg_loss": total["policy_loss"] / count,
        "actor/pg_clipfrac": total["clipped"] / count,
        "actor/pg_clipfrac_lower": total["dual_clipped"] / count,
        "actor/ppo_kl": total["drift"] / count,
        "actor/entropy": total["entropy"] / count,
        "actor/kl_reference": total["kl_reference"] / count,
        "off_policy/kl_behaviour_proximal": total["kl_behaviour_proximal"] / count,
        "importance/mean": total["weights"] / count,
        "importance/max": largest["largest_weight"],
        "importance/clipped_share": total["clipped_weights"] / count,
        "importance/ess": total["weights"] ** 2 / (count * squares),
        "mismatch/lag0_mean": total["lag0_mismatch"] / (total["lag0_tokens"] or math.nan),
        "mismatch/lag0_max": largest["lag0_largest_mismatch"],
    }


def token_lags(batch: Batch, held_version: int) -> npt.NDArray[np.int64]:
    """Lag of every trained token."""
    return held_version - batch.versions[trainable_tokens(batch)].astype(np.int64)


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
        "reward/groups_without_spread": np.mean([np.ptp(g) == 0 for g in groups]),
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
    }
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
