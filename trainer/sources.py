"""Metrics of a batch by data source, so that rare kinds of task are seen and not averaged away.

Always true: there are at most MAX_SOURCES names in a run's reports, and a name keeps its meaning while the trainer
runs: the first sources that are seen get names of their own, all later ones are counted together as `other`.
"""

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from protocol.batch import Batch
from protocol.states import FinishReason
from trainer.overlong import is_without_spread

MAX_SOURCES = 32  # each has a dozen series; trackers and people stop reading somewhere there
OTHER_SOURCES = "other"
MAX_NAME_CHARS = 64  # a metric's name has 120 at the most, its other parts included
FORBIDDEN = re.compile(r"[^A-Za-z0-9_./:@+-]")


class SourceReport:
    """Names the sources of a run, and reports each batch by them."""

    def __init__(self, max_sources: int = MAX_SOURCES) -> None:
        self._max_named = max_sources - 1  # one is for `other`
        self._named: set[str] = set()

    def metrics(self, batch: Batch, held_version: int) -> dict[str, float]:
        """`source/NAME/…` of one batch; `held_version` is what the trainer holds when the step starts."""
        sources = [self._name(group.data_source) for group in batch.header.groups]
        lags = _mean_lags(batch, held_version)
        found: dict[str, float] = {}
        for name in sorted(set(sources)):
            groups = [i for i, source in enumerate(sources) if source == name]
            found |= {f"source/{name}/{key}": value for key, value in _of_groups(batch, groups, lags).items()}
        return found

    def _name(self, source: str) -> str:
        name = metric_name(source)
        if name not in self._named and len(self._named) < self._max_named:
            self._named.add(name)
        return name if name in self._named else OTHER_SOURCES


def source_metrics(batch: Batch, held_version: int) -> dict[str, float]:
    """`source/NAME/…` of one batch by itself; over the steps of a run use one `SourceReport`."""
    return SourceReport().metrics(batch, held_version)


def metric_name(source: str) -> str:
    """A data source as a part of a metric's name: what trackers don't take becomes `_`."""
    return FORBIDDEN.sub("_", source)[:MAX_NAME_CHARS] or "_"


@np.errstate(invalid="ignore")  # as in batch_metrics: what has no value is left out of reports
def _of_groups(batch: Batch, groups: Sequence[int], lags: npt.NDArray[np.float64]) -> dict[str, float]:
    chosen = np.flatnonzero(np.isin(batch.group_index, groups))
    num_failed = sum(len(batch.header.groups[i].failed) for i in groups)
    counts = {"num_groups": float(len(groups)), "num_samples": float(len(chosen)), "num_failed": float(num_failed)}
    if not len(chosen):
        return counts
    rewards = batch.rewards[chosen]
    lengths = (np.diff(batch.sample_offsets) - batch.prompt_lengths)[chosen]
    truncated = [batch.header.samples[i].finish_reason is FinishReason.LENGTH for i in chosen]
    of_groups = [batch.rewards[batch.group_index == i] for i in groups if np.any(batch.group_index == i)]
    return counts | {
        "reward_mean": float(rewards.mean(dtype=np.float64)),
        "length_mean": float(lengths.mean()),
        "length_max": float(lengths.max()),
        "truncated_share": float(np.mean(truncated)),
        "groups_without_spread": float(np.mean([is_without_spread(r) for r in of_groups])),
        "lag_mean": float(np.average(lags[chosen], weights=np.maximum(lengths, 1))),
    }


def _mean_lags(batch: Batch, held_version: int) -> npt.NDArray[np.float64]:
    """Mean lag of the response tokens of each sample [S]; 0 for one without any."""
    written = batch.loss_mask.astype(bool)
    lags = np.where(written, held_version - batch.versions.astype(np.int64), 0)
    begin = batch.sample_offsets[:-1]
    totals = np.concatenate([[0], np.cumsum(lags)])
    counts = np.concatenate([[0], np.cumsum(written)])
    ends = batch.sample_offsets[1:]
    return (totals[ends] - totals[begin]) / np.maximum(counts[ends] - counts[begin], 1)
