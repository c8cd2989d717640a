"""Policy losses of tokens, by the name of `actor.policy_loss`.

With π current, `old` the policy that the ratio is taken against (proximal or behaviour), A advantage, r = π/old:

    ppo_clip    −J(r, A); J = min(r·A, clip(r, 1−ε_low, 1+ε_high)·A);  for A < 0: max(J, c·A)
    gspo        the same clip without c on s, the geometric mean of r over the sequence
    cispo       −sg(clip(r, 1−ε_low, 1+ε_high))·A·log π
    reinforce   −A·log π

All tensors are of the response tokens [R] of one micro-batch, and keep the dtype of the log-probs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.corrections import exp_clamped, ratio
from trainer.spans import Spans


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds of the ratio: [1 - low, 1 + high], and the dual clip `dual` (c) for negative advantages."""

    low: float
    high: float
    dual: float


class TokenLosses(NamedTuple):
    """`loss` [R] to be minimised; `clipped` and `dual_clipped` [R] say where a clip decided the value."""

    loss: Tensor
    clipped: Tensor
    dual_clipped: Tensor


class PolicyInputs(NamedTuple):
    """Log-probs of the sampled tokens under the current policy and under `old`, and the advantages; all [R].

    `counted` [R] says whose ratio counts in the mean of a sequence, where not all do; `old` is `logprobs` elsewhere.
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    counted: Tensor | None = None


def ppo_clip(inputs: PolicyInputs, clip: Clip, sequences: Spans) -> TokenLosses:
    """PPO's clipped surrogate, arXiv 1707.06347, equation 7, with dual clip, arXiv 1912.09729, equation 5."""
    advantages = inputs.advantages
    pessimistic, clipped = _clipped(ratio(inputs.logprobs, inputs.old.detach()), advantages, clip)
    ceiling = -advantages * clip.dual
    negative = advantages < 0
    loss = torch.where(negative, torch.minimum(pessimistic, ceiling), pessimistic)
    return TokenLosses(loss, clipped, negative & (pessimistic > ceiling))


def gspo(inputs: PolicyInputs, clip: Clip, sequences: Spans) -> TokenLosses:
    """Group sequence policy optimisation, arXiv 2507.18071, in its token form, equation 13.

    The value of the ratio is the sequence's, and each token's gradient is scaled by it. Meant for
    `seq-mean-token-mean` and a clip of some 1e-4.
    """
    log_ratio = inputs.logprobs - inputs.old.detach()
    counted = torch.ones_like(log_ratio, dtype=torch.bool) if inputs.counted is None else inputs.counted
    of_sequence = sequences.spread(sequences.means_over(log_ratio.detach(), counted))
    s = exp_clamped(of_sequence + inputs.logprobs - inputs.logprobs.detach())
    pessimistic, clipped = _clipped(s, inputs.advantages, clip)
    return TokenLosses(pessimistic, clipped, torch.zeros_like(clipped))


def cispo(inputs: PolicyInputs, clip: Clip, sequences: Spans) -> TokenLosses:
    """CISPO, arXiv 2506.13585, equation 4: the clipped ratio is a weight, so every token keeps its gradient."""
    r = ratio(inputs.logprobs.detach(), inputs.old.detach())
    bounded = r.clamp(1 - clip.low, 1 + clip.high)
    loss = -bounded * inputs.advantages * inputs.logprobs
    return TokenLosses(loss, r != bounded, torch.zeros_like(r, dtype=torch.bool))


def reinforce(inputs: PolicyInputs, clip: Clip, sequences: Spans) -> TokenLosses:
    """The score-function estimator; what corrects it for lag is a weight outside of it."""
    loss = -inputs.advantages * inputs.logprobs
    nowhere = torch.zeros_like(loss, dtype=torch.bool)
    return TokenLosses(loss, nowhere, nowhere)


POLICY_LOSSES: Mapping[str, Callable[[PolicyInputs, Clip, Spans], TokenLosses]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
}


def _clipped(r: Tensor, advantages: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """The larger of the losses without and with clip, and where that is the latter."""
    plain = -advantages * r
    bounded = -advantages * r.clamp(1 - clip.low, 1 + clip.high)
    return torch.maximum(plain, bounded), bounded > plain
