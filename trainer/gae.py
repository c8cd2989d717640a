"""Returns, generalised advantage estimation, and the critic's loss.

Response tokens of whole samples lie end to end: R tokens, `lengths` of the samples; all in the dtype of the rewards.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class AdvantagesAndReturns(NamedTuple):
    """`advantages` [R], not yet whitened, and `returns` [R], what the critic learns."""

    advantages: Tensor
    returns: Tensor


class ValueLoss(NamedTuple):
    """`loss` [R] to be minimised; `clipped` [R] says where the clip decided the value."""

    loss: Tensor
    clipped: Tensor


def discounted_sums(values: Tensor, lengths: Sequence[int], decay: float) -> Tensor:
    """y_t = values_t + decay · y_{t+1} within each sample, [R]."""
    if not lengths:
        return values.clone()
    longest = max(lengths)
    sizes = torch.tensor(lengths)
    inside = torch.arange(longest)[None, :] < sizes[:, None]  # [S, T]
    padded = values.new_zeros(len(lengths), longest)
    padded[inside] = values
    rows = padded.T.contiguous()  # [T, S]: a step back in time is one row
    for t in range(longest - 2, -1, -1):
        rows[t] += decay * rows[t + 1]
    return rows.T[inside]


def gae(rewards: Tensor, values: Tensor, lengths: Sequence[int], gamma: float, lam: float) -> AdvantagesAndReturns:
    """Generalised advantage estimation, arXiv 1506.02438, equation 16; the state after a response has value 0.

    `rewards` [R] of tokens, `values` [R] of the state before each.
    """
    following = torch.cat([values[1:], values.new_zeros(1)]) if len(values) else values
    ends = torch.tensor(lengths).cumsum(0) - 1 if lengths else torch.zeros(0, dtype=torch.int64)
    following[ends] = 0
    advantages = discounted_sums(rewards + gamma * following - values, lengths, gamma * lam)
    return AdvantagesAndReturns(advantages, advantages + values)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float) -> ValueLoss:
    """Half the larger of the squared errors of the value and of the value kept within `cliprange` of the old one; [R].

    As PPO's reference implementation clips values; the gradient flows through `values` alone.
    """
    bounded = values.clamp(old_values - cliprange, old_values + cliprange)
    plain, clipped = (values - returns).square(), (bounded - returns).square()
    return ValueLoss(0.5 * torch.maximum(plain, clipped), clipped > plain)
