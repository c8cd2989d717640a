"""Importance weights of off-policy tokens, and how far off-policy they are.

All functions work elementwise on tensors of any one shape, written [T] here, and keep the dtype of their inputs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: far beyond any cap, and still finite in every dtype in use but float16


def ratio(log_numerator: Tensor, log_denominator: Tensor) -> Tensor:
    """exp(log_numerator - log_denominator), the difference clamped to ±20; all [T]."""
    return (log_numerator - log_denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def token_tis(proximal: Tensor, behaviour: Tensor, cap: float) -> Tensor:
    """Token-level truncated importance weights min(p/b, C), without gradient.

    `proximal`, `behaviour` [T] log-probs; returns [T]. Truncated importance sampling: Ionides 2008; as the weight of a
    decoupled PPO objective: arXiv 2110.00641 and 2505.24298, equation 5.
    """
    return ratio(proximal, behaviour).clamp(max=cap).detach()


class WeightStats(NamedTuple):
    """Sums over tokens that say how off-policy they are; sums of parts add up, so ranks can be joined."""

    num_tokens: Tensor
    total: Tensor
    total_squares: Tensor
    num_clipped: Tensor
    largest: Tensor

    @property
    def mean(self) -> Tensor:
        """Mean of the untruncated weights; 1 in expectation under the behaviour policy."""
        return self.total / self.num_tokens

    @property
    def clipped_share(self) -> Tensor:
        """Share of tokens whose weight was cut down to the cap."""
        return self.num_clipped / self.num_tokens

    @property
    def effective_sample_share(self) -> Tensor:
        """Kish's effective sample size over the number of tokens: (sum w)² / (n · sum w²); 1 is on-policy."""
        return self.total.square() / (self.num_tokens * self.total_squares)


def weight_stats(proximal: Tensor, behaviour: Tensor, cap: float) -> WeightStats:
    """Sums of the untruncated weights p/b, in float64; `proximal`, `behaviour` [T] log-probs."""
    weights = ratio(proximal.detach().double(), behaviour.double()).flatten()
    none = weights.new_zeros(1)
    return WeightStats(
        num_tokens=weights.new_tensor(weights.numel()),
        total=weights.sum(),
        total_squares=weights.square().sum(),
        num_clipped=(weights > cap).sum().to(weights.dtype),
        largest=torch.cat([none, weights]).max(),
    )
