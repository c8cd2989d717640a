"""Spans of response tokens that share one importance weight: tokens, version runs, sequences.

All tensors are of one packed micro-batch, in its order: samples are whole and their tokens consecutive, so a span never
reaches over the end of a sample.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.settings.algorithm import Level


@dataclass(frozen=True, slots=True)
class Spans:
    """K spans of R tokens. `ids` [R] i64: the span of each token, counted from 0; `sizes` [K] i64: their tokens."""

    ids: Tensor
    sizes: Tensor

    def sums(self, values: Tensor) -> Tensor:
        """Sum of `values` [R] in each span, [K]."""
        return values.new_zeros(len(self.sizes)).index_add(0, self.ids, values)

    def means_over(self, values: Tensor, counted: Tensor) -> Tensor:
        """Mean in each span, [K], of those `values` [R] that are `counted` [R], the others being 0; 0 if none is."""
        return self.sums(values) / self.sums(counted.to(values.dtype)).clamp(min=1)

    def maxima(self, values: Tensor) -> Tensor:
        """Maximum of `values` [R] in each span, [K]."""
        low = values.new_full((len(self.sizes),), -torch.inf)
        return low.scatter_reduce(0, self.ids, values, "amax")

    def any(self, flags: Tensor) -> Tensor:
        """Whether one of `flags` [R] is set in each span, [K]."""
        return self.sums(flags.to(torch.float32)) > 0

    def spread(self, values: Tensor) -> Tensor:
        """Each token's own: `values` [K] of spans as [R] of tokens."""
        return values[self.ids]


def make_spans(samples: Tensor, versions: Tensor, level: Level) -> Spans:
    """Spans of `level`; `samples` [R] says whose each token is, `versions` [R] which policy version wrote it.

    A version run is a maximal run of consecutive tokens of one sample that one version wrote.
    """
    if level == "token":
        return Spans(torch.arange(len(samples), device=samples.device), torch.ones_like(samples))
    starts = torch.ones_like(samples, dtype=torch.bool)  # [R]
    starts[1:] = samples[1:] != samples[:-1]
    if level == "version_run":
        starts[1:] |= versions[1:] != versions[:-1]
    ids = starts.cumsum(0) - 1
    return Spans(ids, torch.bincount(ids, minlength=int(starts.sum())))
