"""Advantage estimators, by the name of `algorithm.adv_estimator`.

Each takes `rewards` [S] (one scalar a sample) and `group_index` [S] (which prompt it answers) and gives `advantages`
[S], in the dtype of the rewards; every response token of a sample gets its sample's advantage. Groups may differ in
size.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

STD_EPSILON = 1e-6  # as in verl, so that a group without spread divides by this and not by zero

Estimator = Callable[[Tensor, Tensor, bool], Tensor]


def grpo(rewards: Tensor, group_index: Tensor, by_std: bool) -> Tensor:
    """Reward minus its group's mean, over the group's unbiased standard deviation plus 1e-6 if `by_std`.

    GRPO, arXiv 2402.03300, equation 4.1.2 (outcome supervision); without the division it is Dr.GRPO, arXiv 2503.20783.
    A group of one sample has no baseline: its reward is kept (mean 0, deviation 1), as verl does. `rewards` [S],
    `group_index` [S] integers; returns [S].
    """
    _, group = torch.unique(group_index, return_inverse=True)  # [S], 0..G-1
    sizes = torch.bincount(group).to(rewards.dtype)  # [G]
    zeros = torch.zeros_like(sizes)
    alone = sizes == 1
    mean = torch.where(alone, zeros, zeros.index_add(0, group, rewards) / sizes)
    centred = rewards - mean[group]
    if not by_std:
        return centred
    squares = zeros.index_add(0, group, centred.square())
    std = torch.where(alone, zeros + 1, (squares / (sizes - 1).clamp(min=1)).sqrt())
    return centred / (std[group] + STD_EPSILON)


ADVANTAGE_ESTIMATORS: Mapping[str, Estimator] = {"grpo": grpo}
