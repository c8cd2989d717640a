"""How token losses become one number, by the name of `actor.loss_agg_mode`.

Each mode gives every token a coefficient that depends on counts of the whole mini-batch, over all micro-batches and
ranks; the loss is the sum of coefficient times token loss. So the parts add up to the same loss and gradient however
the samples are split. With N tokens and M samples in the mini-batch, n tokens in the sample:

    token-mean               1/N
    seq-mean-token-sum       1/M
    seq-mean-token-mean      1/(M·n)
    seq-mean-token-sum-norm  1/(M·L), L a constant (Dr.GRPO, arXiv 2503.20783)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.spans import Spans


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one mini-batch over all ranks: trained tokens, samples that have any, and the constant L."""

    num_tokens: int
    num_samples: int
    scale: float = 1.0


def _token_mean(lengths: Tensor, counts: Counts) -> Tensor:
    return torch.ones_like(lengths) / counts.num_tokens


def _seq_mean_token_sum(lengths: Tensor, counts: Counts) -> Tensor:
    return torch.ones_like(lengths) / counts.num_samples


def _seq_mean_token_mean(lengths: Tensor, counts: Counts) -> Tensor:
    return 1 / (counts.num_samples * lengths)


def _seq_mean_token_sum_norm(lengths: Tensor, counts: Counts) -> Tensor:
    return torch.ones_like(lengths) / (counts.num_samples * counts.scale)


COEFFICIENTS: Mapping[str, Callable[[Tensor, Counts], Tensor]] = {
    "token-mean": _token_mean,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "seq-mean-token-mean": _seq_mean_token_mean,
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
}


def aggregate(mode: str, values: Tensor, sequences: Spans, counts: Counts) -> Tensor:
    """This part's share of the mini-batch's loss, a scalar, from the token losses `values` [R] of whole samples."""
    lengths = sequences.spread(sequences.sizes).to(values.dtype)  # [R]: tokens of each token's sample
    return (values * COEFFICIENTS[mode](lengths, counts)).sum()
