"""Advantage estimators: what of a sample's score is better than expected.

Estimators of samples take `scores` [S] (one a sample) and `group_index` [S] (which prompt it answers) and give [S], in
the dtype of the scores; every response token of a sample gets its sample's advantage. Groups may differ in size.
Estimators of tokens (`reinforce_plus_plus`, `gae`) work on rewards of tokens, in `trainer.gae`. `whiten` is over the
tokens of the whole batch, on all ranks.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

STD_EPSILON = 1e-6  # as in verl, so that a group without spread divides by this and not by zero
VARIANCE_EPSILON = 1e-8  # as in verl's whitening

Estimator = Callable[[Tensor, Tensor, bool], Tensor]


def grpo(scores: Tensor, group_index: Tensor, by_std: bool) -> Tensor:
    """Score minus its group's mean, over the group's unbiased standard deviation plus 1e-6 if `by_std`.

    GRPO, arXiv 2402.03300, section 4.1.2 (outcome supervision); without the division it is Dr.GRPO, arXiv 2503.20783.
    A group of one sample has no baseline: its score is kept (mean 0, deviation 1), as verl does.
    """
    group, sizes = _groups(scores, group_index)
    zeros = torch.zeros_like(sizes)
    alone = sizes == 1
    mean = torch.where(alone, zeros, zeros.index_add(0, group, scores) / sizes)
    centred = scores - mean[group]
    if not by_std:
        return centred
    squares = zeros.index_add(0, group, centred.square())
    std = torch.where(alone, zeros + 1, (squares / (sizes - 1).clamp(min=1)).sqrt())
    return centred / (std[group] + STD_EPSILON)


def rloo(scores: Tensor, group_index: Tensor, by_std: bool) -> Tensor:
    """Score minus the mean of the others of its group, arXiv 2402.14740, equation 8; `by_std` is not used.

    A group of one sample has no others: its score is kept.
    """
    group, sizes = _groups(scores, group_index)
    sums = torch.zeros_like(sizes).index_add(0, group, scores)[group]
    others = (sizes - 1)[group]
    return torch.where(others > 0, scores - (sums - scores) / others.clamp(min=1), scores)


def group_baseline(scores: Tensor, group_index: Tensor, by_std: bool) -> Tensor:
    """Score minus its group's mean; `by_std` is not used. REINFORCE++-baseline, arXiv 2501.03262, whitens this.

    A group of one sample has no baseline: its score is kept.
    """
    return grpo(scores, group_index, by_std=False)


SAMPLE_ESTIMATORS: Mapping[str, Estimator] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce_plus_plus_baseline": group_baseline,
}
WHITENED = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"})


def whiten(parts: Sequence[Tensor], total: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Each of `parts` less the mean and over the standard deviation (unbiased) of all tokens on all ranks.

    `parts` are float64 [R_i] on the CPU, this rank's; `total` adds a tensor up over ranks.
    """
    values = torch.cat([torch.zeros(0, dtype=torch.float64), *parts])
    size = torch.tensor([float(len(values)), float(values.sum())], dtype=torch.float64)
    count, summed = total(size).tolist()
    mean = summed / max(1.0, count)
    squares = total((values - mean).square().sum()[None])
    variance = squares[0] / max(1.0, count - 1)
    return [(part - mean) * torch.rsqrt(variance + VARIANCE_EPSILON) for part in parts]


def _groups(scores: Tensor, group_index: Tensor) -> tuple[Tensor, Tensor]:
    """The group of each sample, counted from 0, [S], and the size of each group, [G]."""
    _, group = torch.unique(group_index, return_inverse=True)
    return group, torch.bincount(group).to(scores.dtype)
