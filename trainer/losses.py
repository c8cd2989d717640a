"""Policy losses of tokens, and how token losses become one number.

With π current, p proximal, b behaviour policy, A advantage and r a ratio of probabilities:

    J(r, A) = min(r·A, clip(r, 1−ε_low, 1+ε_high)·A);  for A < 0: max(J, c·A)    dual clip, arXiv 1912.09729
    decoupled:  L = − sg(min(p/b, C)) · J(π/p, A)                                arXiv 2110.00641, 2505.24298
    behaviour:  L = − J(π/b, A)
    none:       L = − J(π/p, A)                                                  biased once lag > 0

All functions work elementwise on tensors of any one shape, written [T] here, and keep the dtype of their inputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from protocol.settings.trainer import Correction
from trainer.corrections import ratio, token_tis


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds of the PPO ratio: [1 - low, 1 + high], and the dual clip `dual` (c) for negative advantages."""

    low: float
    high: float
    dual: float


class TokenLosses(NamedTuple):
    """`loss` [T] to be minimised; `clipped` and `dual_clipped` [T] say where a clip decided the value."""

    loss: Tensor
    clipped: Tensor
    dual_clipped: Tensor


class PolicyInputs(NamedTuple):
    """Log-probs of the sampled tokens under the three policies, and the advantages; all [T]."""

    logprobs: Tensor
    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor


def ppo_clip(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: Clip) -> TokenLosses:
    """-J(π/old, A) of each token: PPO's clipped surrogate, arXiv 1707.06347, equation 7, with dual clip.

    `logprobs`, `old_logprobs`, `advantages` [T]; the gradient flows through `logprobs` alone.
    """
    r = ratio(logprobs, old_logprobs.detach())
    plain = -advantages * r
    bounded = -advantages * r.clamp(1 - clip.low, 1 + clip.high)
    pessimistic = torch.maximum(plain, bounded)
    ceiling = -advantages * clip.dual
    negative = advantages < 0
    loss = torch.where(negative, torch.minimum(pessimistic, ceiling), pessimistic)
    return TokenLosses(loss, bounded > plain, negative & (pessimistic > ceiling))


def decoupled(inputs: PolicyInputs, clip: Clip, cap: float) -> TokenLosses:
    """PPO around the proximal policy, each token weighted by min(p/b, C)."""
    losses = ppo_clip(inputs.logprobs, inputs.proximal, inputs.advantages, clip)
    return losses._replace(loss=losses.loss * token_tis(inputs.proximal, inputs.behaviour, cap))


def behaviour(inputs: PolicyInputs, clip: Clip, cap: float) -> TokenLosses:
    """PPO around the behaviour policy: its ratio is the whole correction, so `cap` is not used."""
    return ppo_clip(inputs.logprobs, inputs.behaviour, inputs.advantages, clip)


def uncorrected(inputs: PolicyInputs, clip: Clip, cap: float) -> TokenLosses:
    """PPO around the proximal policy as if it had written every token: no weight, so `cap` is not used."""
    return ppo_clip(inputs.logprobs, inputs.proximal, inputs.advantages, clip)


POLICY_LOSSES: Mapping[Correction, Callable[[PolicyInputs, Clip, float], TokenLosses]] = {
    Correction.DECOUPLED: decoupled,
    Correction.BEHAVIOUR: behaviour,
    Correction.NONE: uncorrected,
}


def token_mean(values: Tensor, num_tokens: int | Tensor) -> Tensor:
    """This part's share of the mean over `num_tokens` tokens: the sum of `values` [T] over all of them.

    `num_tokens` counts the tokens of the whole mini-batch over all micro-batches and ranks, so that the parts add up to
    the same loss and gradient for every split.
    """
    return values.sum() / num_tokens


TOKEN_AGGREGATIONS: Mapping[str, Callable[[Tensor, int | Tensor], Tensor]] = {"token-mean": token_mean}
