"""The part of a batch that one optimizer update is made of, on this rank.

Always true: every rank has the same mini-batches with equal numbers of micro-batches; ranks of one replica have the
same micro-batches; `num_tokens` and `num_samples` count over all ranks; a sample that is left out of the update is in
none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocol.batch import Batch
from trainer.distributed import Ranks
from trainer.packing import Bounds, MicroBatch, mini_batches, pack, plan_ranks, trainable_tokens


@dataclass(slots=True)
class MiniBatch:
    """Micro-batches of this rank, and what is known of each: log-probs or values [R], None where not known or wanted.

    `returns` are what the critic learns; `mean_weight` is what importance weights are divided by.
    """

    micros: list[MicroBatch]
    num_tokens: int
    num_samples: int
    proximal: list[Tensor | None]
    reference: list[Tensor | None]
    values: list[Tensor] = field(default_factory=list[Tensor])
    returns: list[Tensor] = field(default_factory=list[Tensor])
    mean_weight: float = 1.0


def split_batch(
    batch: Batch, keep: npt.NDArray[np.bool_], num_prompts: int, bounds: Bounds, ranks: Ranks, device: torch.device
) -> list[MiniBatch]:
    """Mini-batches of `num_prompts` prompts from the samples that `keep` [S] names; those without any are left out."""
    lengths = np.diff(batch.sample_offsets)
    trained = _trained_tokens(batch)
    minis: list[MiniBatch] = []
    for members in mini_batches(batch.group_index, num_prompts):
        samples = [i for i in members if keep[i]]
        if not samples:
            continue
        bins = plan_ranks([int(lengths[i]) for i in samples], bounds, ranks.num_replicas)[ranks.replica]
        packed = [pack(batch, [samples[i] for i in b]).to(device) for b in bins]
        unknown: list[Tensor | None] = [None] * len(packed)
        of_mini = trained[samples]
        minis.append(MiniBatch(packed, int(of_mini.sum()), int((of_mini > 0).sum()), unknown, unknown.copy()))
    return minis


def sample_lengths(micro: MicroBatch) -> list[int]:
    """Response tokens of each sample of `micro` that has any, in its order."""
    return torch.unique_consecutive(micro.samples, return_counts=True)[1].tolist()


def all_micros(minis: Sequence[MiniBatch]) -> list[MicroBatch]:
    """Micro-batches of all `minis`, in order."""
    return [micro for mini in minis for micro in mini.micros]


def _trained_tokens(batch: Batch) -> npt.NDArray[np.int64]:
    """Tokens of each sample that a loss is computed on, [S]."""
    ends = np.concatenate([[0], trainable_tokens(batch).cumsum()])
    return ends[batch.sample_offsets[1:]] - ends[batch.sample_offsets[:-1]]
