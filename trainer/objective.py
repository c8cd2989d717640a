"""The loss of a micro-batch, and sums over its tokens that the metrics are made of.

Always true: the loss is a share of the mini-batch's loss (`Counts` are of the whole mini-batch), so the shares of all
micro-batches and ranks add up to the same loss and gradient, however the samples were split. With L the policy loss of
`trainer.losses` against the policy named, p proximal, b behaviour, w the weight of `trainer.corrections`:

    decoupled  w(p/b) · L(π against p)                       arXiv 2110.00641, 2505.24298
    behaviour  L(π against b); for `reinforce` w(sg(π)/b) · L, whose ratio it has not
    none       L(π against p)                                biased once lag > 0
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from protocol.settings import RunSettings
from protocol.settings.algorithm import Correction
from trainer import off_policy
from trainer.aggregation import Counts, aggregate
from trainer.corrections import Corrector, Weights, interpolated_proximal, make_corrector
from trainer.kl import KL_ESTIMATORS
from trainer.logprobs import TokenLogprobs
from trainer.losses import POLICY_LOSSES, Clip, PolicyInputs, TokenLosses
from trainer.packing import MicroBatch
from trainer.spans import Spans, make_spans

OWN_SUMS = ("tokens", "policy_loss", "clipped", "dual_clipped", "drift", "entropy", "kl_reference")
SUM_NAMES = (*OWN_SUMS, *off_policy.SUM_NAMES)
MAX_NAMES = off_policy.MAX_NAMES


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
    """What is minimised: policy loss − entropy_coeff · entropy + kl_coef · KL(policy‖reference), aggregated alike.

    Tokens that the correction leaves out lose their policy loss, not their entropy and KL.
    """

    correction: Correction
    clip: Clip
    corrector: Corrector = field(default_factory=Corrector)
    policy_loss: str = "ppo_clip"
    aggregation: str = "token-mean"
    loss_scale: float = 1.0
    entropy_coeff: float = 0.0
    kl_coef: float = 0.0
    kl_type: str = "low_var_kl"
    normalises: bool = False
    interpolates: bool = False
    kl_in_reward: bool = False

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy takes part, in the loss or in the reward."""
        return self.kl_coef > 0 or self.kl_in_reward

    @property
    def needs_proximal(self) -> bool:
        """Whether the loss itself uses proximal log-probs of a forward pass at the start of the step."""
        return self.correction is not Correction.BEHAVIOUR and not self.interpolates

    def counts(self, num_tokens: int, num_samples: int) -> Counts:
        """What the loss of a mini-batch of that many trained tokens and samples is divided by."""
        return Counts(max(1, num_tokens), max(1, num_samples), self.loss_scale)

    def weigh(self, proximal: Tensor, micro: MicroBatch) -> Weights:
        """Importance weights of a micro-batch, for their mean over the mini-batch."""
        return self.corrector.weigh(proximal, micro.behaviour.to(proximal.dtype), micro.samples, micro.versions)

    def proximal(self, logprobs: Tensor, micro: MicroBatch, held_version: int, progress: float) -> Tensor:
        """Proximal log-probs [R] where none were computed ahead; `progress` is the share of updates made."""
        if not self.interpolates:
            return logprobs.detach()
        return interpolated_proximal(
            logprobs, micro.behaviour.to(logprobs.dtype), micro.versions, held_version, progress
        )

    def loss(
        self,
        out: TokenLogprobs,
        micro: MicroBatch,
        anchors: Anchors,
        counts: Counts,
        held_version: int,
        mean_weight: float = 1.0,
    ) -> MicroLoss:
        """Of one micro-batch; `held_version` is the version that the trainer holds, `mean_weight` what weights are
        divided by."""
        sequences = make_spans(micro.samples, micro.versions, "sequence")
        weights, losses = self._policy_loss(out.logprobs, micro, anchors.proximal, sequences, mean_weight)
        per_token = losses.loss - self.entropy_coeff * out.entropy
        kl = None
        if anchors.reference is not None and self.kl_coef > 0:
            kl = KL_ESTIMATORS[self.kl_type](out.logprobs, anchors.reference)
            per_token = per_token + self.kl_coef * kl
        loss = aggregate(self.aggregation, per_token, sequences, counts)
        with torch.no_grad():
            own = self._own_sums(out, losses, anchors.proximal, kl)
            lags = held_version - micro.versions
            sums, maxima = off_policy.off_policy_sums(anchors.proximal, micro.behaviour, weights, lags, sequences)
        sums |= own
        return MicroLoss(
            loss,
            per_token.detach(),
            torch.stack([sums[name].double() for name in SUM_NAMES]).cpu(),
            torch.stack([maxima[name].double() for name in MAX_NAMES]).cpu(),
        )

    def _policy_loss(
        self, logprobs: Tensor, micro: MicroBatch, proximal: Tensor, sequences: Spans, mean_weight: float
    ) -> tuple[Weights, TokenLosses]:
        behaviour = micro.behaviour.to(logprobs.dtype)
        from_behaviour = self.correction is Correction.BEHAVIOUR
        target = logprobs.detach() if from_behaviour else proximal
        weights = self.corrector.weigh(target, behaviour, micro.samples, micro.versions)
        # What is not finite is replaced before it is used: zero times infinity, also in a gradient, is not zero.
        old = torch.where(weights.usable, behaviour, target) if from_behaviour else proximal
        counted = weights.usable if from_behaviour else None
        inputs = PolicyInputs(logprobs, old, micro.advantages.to(logprobs.dtype), counted)
        losses = POLICY_LOSSES[self.policy_loss](inputs, self.clip, sequences)
        loss = losses.loss
        if self.correction is Correction.DECOUPLED or (from_behaviour and self.policy_loss == "reinforce"):
            loss = loss * (weights.weight / mean_weight)
        if self.correction is not Correction.NONE:
            loss = torch.where(weights.keep, loss, torch.zeros_like(loss))
        return weights, losses._replace(loss=loss)

    def _own_sums(
        self, out: TokenLogprobs, losses: TokenLosses, proximal: Tensor, kl: Tensor | None
    ) -> dict[str, Tensor]:
        return {
            "tokens": out.logprobs.new_tensor(out.logprobs.numel(), dtype=torch.float64),
            "policy_loss": losses.loss.sum(),
            "clipped": losses.clipped.sum(),
            "dual_clipped": losses.dual_clipped.sum(),
            "drift": (proximal - out.logprobs).sum(),
            "entropy": out.entropy.sum(),
            "kl_reference": kl.sum() if kl is not None else out.entropy.new_zeros(()),
        }


def make_objective(settings: RunSettings) -> Objective:
    """What the settings ask for."""
    actor, algorithm = settings.actor, settings.algorithm
    return Objective(
        correction=algorithm.correction,
        clip=Clip(actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c),
        corrector=make_corrector(algorithm),
        policy_loss=actor.policy_loss,
        aggregation=actor.loss_agg_mode,
        loss_scale=actor.loss_scale_factor or settings.data.max_response_length,
        entropy_coeff=actor.entropy_coeff,
        kl_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        kl_type=actor.kl_loss_type,
        normalises=algorithm.correction_normalise,
        interpolates=algorithm.proximal == "loglinear",
        kl_in_reward=algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef > 0,
    )
