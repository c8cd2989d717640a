"""From a decoded batch to packed micro-batches: samples laid end to end, no padding, no sample cut.

Always true of a plan: every sample of its mini-batch is in exactly one micro-batch of one rank; every rank has the same
number of micro-batches (empty ones where needed), because ranks that run collectives a different number of times hang;
a micro-batch keeps to its bounds unless it is one sample that alone exceeds them. The plan is a pure function of its
arguments, so every rank works it out for itself and they agree.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocol.batch import Batch
from protocol.settings.trainer import ActorSettings

Bins = list[list[int]]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one micro-batch: tokens and samples, where not None; `padded`: each sample counts as long as the longest."""

    max_tokens: int | None
    max_samples: int | None = None
    padded: bool = False

    def allow(self, num_samples: int, num_tokens: int, longest: int) -> bool:
        """Whether so many samples may be one micro-batch; one sample alone always may."""
        if num_samples <= 1:
            return True
        size = longest * num_samples if self.padded else num_tokens
        few = self.max_samples is None or num_samples <= self.max_samples
        return few and (self.max_tokens is None or size <= self.max_tokens)


def micro_batch_bounds(actor: ActorSettings, padded: bool = False) -> Bounds:
    """What the settings say: tokens (and samples) with `use_dynamic_bsz`, a number of samples without.

    Ranks that share a micro-batch have room for its tokens together.
    """
    together = actor.ppo_max_token_len_per_gpu * actor.ulysses_sequence_parallel_size
    tokens = together if actor.use_dynamic_bsz else None
    return Bounds(tokens, actor.ppo_micro_batch_size_per_gpu, padded)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed samples: T tokens of S samples, R of them response tokens.

    tokens [T] i64; positions [T] i64, from 0 in each sample; lengths: tokens of each sample; predictors [R] i64:
    index of the packed token whose hidden state predicts response token r; targets [R] i64: its id; behaviour [R]
    f32; advantages [R] f32; versions [R] i32; samples [R] i64: the sample of each, as an index into the batch.
    """

    sample_indices: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: Tensor
    positions: Tensor
    predictors: Tensor
    targets: Tensor
    behaviour: Tensor
    advantages: Tensor
    versions: Tensor
    samples: Tensor

    def with_advantages(self, advantages: Tensor) -> "MicroBatch":
        """The same with `advantages` [R]."""
        return replace(self, advantages=advantages.to(self.advantages))

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on `device`."""
        moved = {name: getattr(self, name).to(device) for name in _TENSORS}
        return MicroBatch(sample_indices=self.sample_indices, lengths=self.lengths, **moved)


_TENSORS = ("tokens", "positions", "predictors", "targets", "behaviour", "advantages", "versions", "samples")


def mini_batches(group_index: npt.NDArray[np.int32], num_prompts: int) -> list[list[int]]:
    """Samples of each mini-batch of `num_prompts` prompts, in the batch's order; empty mini-batches are left out."""
    of_sample = group_index // num_prompts
    return [np.flatnonzero(of_sample == m).tolist() for m in np.unique(of_sample)]


def plan_ranks(lengths: Sequence[int], bounds: Bounds, num_ranks: int) -> list[Bins]:
    """For each rank its micro-batches, as indices into `lengths`; see the module's invariants.

    First-fit decreasing finds how many are needed; then the samples are spread evenly over that many, longest first
    into the emptiest, so that ranks finish together. If spreading breaks a bound, the first packing stands; it always
    does for the padded form, where samples of like length belong together.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    packed = _first_fit(longest_first, lengths, bounds)
    per_rank = -(-len(packed) // num_ranks)
    even = [] if bounds.padded else _spread(longest_first, lengths, per_rank * num_ranks, bounds.max_samples)
    bins = even if even and all(_allowed(b, lengths, bounds) for b in even) else packed
    bins = sorted(bins, key=lambda b: -sum(lengths[i] for i in b))
    ranks: list[Bins] = [[] for _ in range(num_ranks)]
    for place in range(per_rank * num_ranks):
        row, column = divmod(place, num_ranks)
        # Snake order: the rank that got the largest of one row gets the smallest of the next.
        rank = column if row % 2 == 0 else num_ranks - 1 - column
        ranks[rank].append(sorted(bins[place]) if place < len(bins) else [])
    return ranks


def pack(batch: Batch, indices: Sequence[int], advantages: npt.NDArray[np.float32] | None = None) -> MicroBatch:
    """The samples `indices` of `batch`, packed; `advantages` [S] has one for each sample of the batch, by default 0.

    Without samples it is one token that nothing is predicted from: a model pass that contributes exactly zero.
    """
    if not indices:
        return _empty()
    spans = [np.arange(batch.sample_offsets[i], batch.sample_offsets[i + 1]) for i in indices]
    where = np.concatenate(spans)  # [T] into the batch
    lengths = [len(s) for s in spans]
    predicted = np.flatnonzero(batch.loss_mask[where])  # [R] into the pack
    positions = np.concatenate([np.arange(n) for n in lengths])
    # A token at position 0 has nothing before it in its own sample: its neighbour may not predict it.
    predicted = predicted[positions[predicted] > 0]
    source = where[predicted]
    sample = np.repeat(np.asarray(indices, np.int64), lengths)[predicted]
    return MicroBatch(
        sample_indices=tuple(indices),
        lengths=tuple(lengths),
        tokens=torch.from_numpy(batch.tokens[where].astype(np.int64)),
        positions=torch.from_numpy(positions.astype(np.int64)),
        predictors=torch.from_numpy(predicted - 1),
        targets=torch.from_numpy(batch.tokens[source].astype(np.int64)),
        behaviour=torch.from_numpy(batch.logprobs[source].astype(np.float32)),
        advantages=torch.zeros(len(sample)) if advantages is None else torch.from_numpy(advantages[sample]),
        versions=torch.from_numpy(batch.versions[source].astype(np.int32)),
        samples=torch.from_numpy(sample),
    )


def trainable_tokens(batch: Batch) -> npt.NDArray[np.bool_]:
    """Tokens that a loss is computed on [T]: response tokens, save one without a token before it."""
    trainable = batch.loss_mask.astype(bool)
    starts = batch.sample_offsets[:-1][np.diff(batch.sample_offsets) > 0]
    trainable[starts] = False
    return trainable


def num_trained_tokens(batch: Batch, indices: Sequence[int]) -> int:
    """Tokens that the loss of the samples `indices` is a mean over."""
    trainable = trainable_tokens(batch)
    return int(sum(trainable[batch.sample_offsets[i] : batch.sample_offsets[i + 1]].sum() for i in indices))


def _empty() -> MicroBatch:
    none = torch.zeros(0, dtype=torch.int64)
    one = torch.zeros(1, dtype=torch.int64)
    nothing = torch.zeros(0)
    return MicroBatch((), (1,), one, one, none, none, nothing, nothing, none.to(torch.int32), none)


def _first_fit(longest_first: Sequence[int], lengths: Sequence[int], bounds: Bounds) -> Bins:
    bins: Bins = []
    tokens: list[int] = []
    for i in longest_first:
        for b, members in enumerate(bins):
            if bounds.allow(len(members) + 1, tokens[b] + lengths[i], lengths[members[0]]):
                members.append(i)
                tokens[b] += lengths[i]
                break
        else:
            bins.append([i])
            tokens.append(lengths[i])
    return bins


def _spread(longest_first: Sequence[int], lengths: Sequence[int], num_bins: int, max_samples: int | None) -> Bins:
    bins: Bins = [[] for _ in range(num_bins)]
    emptiest = [(0, b) for b in range(num_bins)]  # a heap of (tokens, micro-batch)
    for i in longest_first:
        tokens, b = heapq.heappop(emptiest)
        bins[b].append(i)
        if len(bins[b]) != max_samples:
            heapq.heappush(emptiest, (tokens + lengths[i], b))
    return bins


def _allowed(samples: Sequence[int], lengths: Sequence[int], bounds: Bounds) -> bool:
    of_samples = [lengths[i] for i in samples]
    return bounds.allow(len(samples), sum(of_samples), max(of_samples, default=0))
