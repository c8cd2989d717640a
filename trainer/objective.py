"""The loss of a micro-batch, and sums over its tokens that the metrics are made of.

Always true: the loss is a share of the mini-batch's loss (`num_tokens` counts the tokens of the whole mini-batch), so
the shares of all micro-batches and ranks add up to the same loss and gradient, however the samples were split.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from protocol.settings import RunSettings
from protocol.settings.trainer import Correction
from trainer.corrections import weight_stats
from trainer.kl import KL_ESTIMATORS, low_var_kl
from trainer.logprobs import TokenLogprobs
from trainer.losses import POLICY_LOSSES, TOKEN_AGGREGATIONS, Clip, PolicyInputs, TokenLosses
from trainer.packing import MicroBatch

SUM_NAMES = (
    "tokens",
    "policy_loss",
    "clipped",
    "dual_clipped",
    "drift",
    "entropy",
    "kl_reference",
    "kl_behaviour_proximal",
    "weights",
    "squared_weights",
    "clipped_weights",
    "lag0_tokens",
    "lag0_mismatch",
)
MAX_NAMES = ("largest_weight", "lag0_largest_mismatch")


class Anchors(NamedTuple):
    """Log-probs that the current ones are held against, [R]: of the proximal policy, and of the reference if any."""

    proximal: Tensor
    reference: Tensor | None


class MicroLoss(NamedTuple):
    """`loss` to be differentiated, `per_token` [R] of it; `sums` and `maxima` by SUM_NAMES and MAX_NAMES, float64."""

    loss: Tensor
    per_token: Tensor
    sums: Tensor
    maxima: Tensor


@dataclass(frozen=True, slots=True)
class Objective:
    """What is minimised: policy loss − entropy_coeff · entropy + kl_coef · KL(policy‖reference), each a token mean."""

    correction: Correction
    clip: Clip
    cap: float
    aggregation: str
    entropy_coeff: float
    kl_coef: float
    kl_type: str

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy takes part."""
        return self.kl_coef > 0

    @property
    def needs_proximal(self) -> bool:
        """Whether the loss itself uses proximal log-probs."""
        return self.correction is not Correction.BEHAVIOUR

    def loss(
        self, out: TokenLogprobs, micro: MicroBatch, anchors: Anchors, num_tokens: int, held_version: int
    ) -> MicroLoss:
        """Of one micro-batch; `held_version` is the version that the trainer holds, for what has lag 0."""
        dtype = out.logprobs.dtype
        inputs = PolicyInputs(out.logprobs, anchors.proximal, micro.behaviour.to(dtype), micro.advantages.to(dtype))
        losses = POLICY_LOSSES[self.correction](inputs, self.clip, self.cap)
        per_token = losses.loss - self.entropy_coeff * out.entropy
        kl = None
        if anchors.reference is not None:
            kl = KL_ESTIMATORS[self.kl_type](out.logprobs, anchors.reference)
            per_token = per_token + self.kl_coef * kl
        with torch.no_grad():
            sums, maxima = self._statistics(losses, inputs, out.entropy, kl, micro.versions == held_version)
        aggregate = TOKEN_AGGREGATIONS[self.aggregation]
        return MicroLoss(aggregate(per_token, num_tokens), per_token.detach(), sums, maxima)

    def _statistics(
        self, losses: TokenLosses, inputs: PolicyInputs, entropy: Tensor, kl: Tensor | None, lag0: Tensor
    ) -> tuple[Tensor, Tensor]:
        weights = weight_stats(inputs.proximal, inputs.behaviour, self.cap)
        mismatch = (inputs.proximal - inputs.behaviour).abs()[lag0].double()
        zero = torch.zeros((), dtype=torch.float64, device=entropy.device)
        sums = {
            "tokens": weights.num_tokens,
            "policy_loss": losses.loss.sum(),
            "clipped": losses.clipped.sum(),
            "dual_clipped": losses.dual_clipped.sum(),
            "drift": (inputs.proximal - inputs.logprobs).sum(),
            "entropy": entropy.sum(),
            "kl_reference": kl.sum() if kl is not None else zero,
            "kl_behaviour_proximal": low_var_kl(inputs.behaviour, inputs.proximal).sum(),
            "weights": weights.total,
            "squared_weights": weights.total_squares,
            "clipped_weights": weights.num_clipped,
            "lag0_tokens": lag0.sum(),
            "lag0_mismatch": mismatch.sum(),
        }
        maxima = {
            "largest_weight": weights.largest,
            "lag0_largest_mismatch": torch.cat([mismatch, zero[None]]).max(),
        }
        return (
            torch.stack([sums[name].double() for name in SUM_NAMES]).cpu(),
            torch.stack([maxima[name].double() for name in MAX_NAMES]).cpu(),
        )


def make_objective(settings: RunSettings) -> Objective:
    """What the settings ask for."""
    actor, algorithm = settings.actor, settings.algorithm
    return Objective(
        correction=algorithm.correction,
        clip=Clip(actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c),
        cap=algorithm.correction_cap,
        aggregation=actor.loss_agg_mode,
        entropy_coeff=actor.entropy_coeff,
        kl_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        kl_type=actor.kl_loss_type,
    )
