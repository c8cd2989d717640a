"""The tail: how long responses are and how long they take, with what isn't finished counted as what it is.

Curves have at most MAX_CURVE points on a logarithmic grid: a complementary distribution is looked at on log axes.
"""

from collections.abc import Sequence
from statistics import fmean

import numpy as np
import numpy.typing as npt

from protocol.watching import Quantiles, Tail
from rollout_service.tuning.lengths import survival_of
from rollout_service.tuning.lengths_stats import reward_bins, stragglers
from rollout_service.tuning.survival import Survival
from rollout_service.tuning.trace_reader import TracedSample
from rollout_service.watch.as_trace import ends_only, traced_samples
from rollout_service.watch.recent import View

MAX_CURVE = 200
SHARES = (0.5, 0.9, 0.99)

Floats = npt.NDArray[np.float64]


def tail(view: View) -> Tail:
    """Of all samples that are remembered."""
    samples = [sample for sample in traced_samples(view, ends_only) if sample.num_tokens or sample.finished]
    finished = [sample for sample in samples if sample.finished]
    lengths = [float(sample.num_tokens) for sample in finished]
    took = [h.finished_at - h.first_at for h in view.samples if h.finished_at is not None]
    trained = trained_lengths(samples, view.limits.n if view.limits else 0)
    survival = survival_of(samples) if finished else None
    return Tail(
        num_finished=len(finished),
        num_unfinished=len(samples) - len(finished),
        tokens=quantiles(lengths),
        survival_tokens=_survival_quantiles(survival),
        finish_s=quantiles(took),
        token_curve=curve(lengths),
        finish_curve=curve(took),
        trained_curve=curve(trained),
        survival=survival_curve(survival) if survival else [],
        trained_tokens=fmean(trained) if trained else None,
        dispatched_tokens=survival.mean() if survival else None,
        by_length=reward_bins(finished),
        stragglers=stragglers(samples),
    )


def trained_lengths(samples: Sequence[TracedSample], group_samples: int) -> list[float]:
    """Of whole groups: those that have finished `group_samples` samples (0: all that are known of them)."""
    groups: dict[str, list[TracedSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    return [
        float(sample.num_tokens)
        for group in groups.values()
        if sum(s.finished or s.failed is not None for s in group) >= (group_samples or len(group))
        for sample in group
        if sample.finished
    ]


def quantiles(values: Sequence[float]) -> Quantiles:
    """p50, p90, p99 and the largest."""
    if not values:
        return Quantiles(p50=None, p90=None, p99=None, largest=None)
    p50, p90, p99 = (float(value) for value in np.quantile(np.asarray(values), SHARES))
    return Quantiles(p50=p50, p90=p90, p99=p99, largest=float(max(values)))


def curve(values: Sequence[float]) -> list[tuple[float, float]]:
    """(value, share of the values that are larger)."""
    if not values:
        return []
    ordered: Floats = np.sort(np.asarray(values, np.float64))
    at = _on_grid(np.unique(ordered))
    larger = 1 - np.searchsorted(ordered, at, side="right") / len(ordered)
    return [(_short(value), round(float(share), 6)) for value, share in zip(at, larger, strict=True)]


def survival_curve(found: Survival) -> list[tuple[float, float, float, float]]:
    """(tokens, share of responses that are longer, its band of 95 %)."""
    at = _on_grid(found.lengths.astype(np.float64))
    index = np.searchsorted(found.lengths, at)
    columns = (found.survival[index], found.lower[index], found.upper[index])
    rows = zip(at, *columns, strict=True)
    return [(float(t), round(float(s), 6), round(float(a), 6), round(float(b), 6)) for t, s, a, b in rows]


def _on_grid(distinct: Floats) -> Floats:
    """Of ascending values at most MAX_CURVE, about as far apart on a log scale; the first and the last among them."""
    if len(distinct) <= MAX_CURVE:
        return distinct
    positive = np.maximum(distinct, 1e-6)
    grid = np.geomspace(positive[0], positive[-1], MAX_CURVE)
    index = np.unique(np.minimum(np.searchsorted(positive, grid), len(distinct) - 1))
    index[0], index[-1] = 0, len(distinct) - 1
    return distinct[index]


def _survival_quantiles(found: Survival | None) -> Quantiles:
    if found is None:
        return quantiles([])
    p50, p90, p99 = (found.quantile(share) for share in SHARES)
    return Quantiles(p50=p50, p90=p90, p99=p99, largest=float(found.longest))


def _short(value: float) -> float:
    return float(f"{value:.6g}")
