"""From the rewards of a batch to the advantage of every token.

Score of a sample: its reward plus the overlong penalty. Reward of a token: the score on the sample's last token, less
β·KL(policy‖reference) on each where the KL is in the reward. Estimators of samples see the sum of a sample's token
rewards, estimators of tokens the tokens'.

Always true: all of it is float64 on the CPU, so that equal scores have a deviation of exactly zero; what is taken over
the batch (baselines, whitening, the mean KL) is taken over all ranks; a sample whose score, KL or value is not finite
is named instead of spreading over the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocol.batch import Batch
from protocol.settings import RunSettings
from protocol.settings.algorithm import TOKEN_ESTIMATORS
from trainer.advantages import SAMPLE_ESTIMATORS, WHITENED, whiten
from trainer.distributed import Ranks
from trainer.gae import AdvantagesAndReturns, discounted_sums, gae
from trainer.kl import KL_ESTIMATORS, KlController
from trainer.mini_batch import MiniBatch, all_micros, sample_lengths
from trainer.packing import MicroBatch


@dataclass(slots=True)
class CreditReport:
    """`bad` names samples of this rank whose advantage would not be finite; `metrics` are over all ranks.

    `usable` says, alike on every rank, whether there was no such sample: else no advantage was set.
    """

    usable: bool = True
    bad: list[int] = field(default_factory=list[int])
    metrics: dict[str, float] = field(default_factory=dict[str, float])


class CreditAssigner:
    """Gives every micro-batch its advantages, and the critic its returns; every rank calls it together."""

    def __init__(self, settings: RunSettings, ranks: Ranks) -> None:
        self._algorithm = settings.algorithm
        self._ranks = ranks
        self.controller = KlController(settings.algorithm.kl_ctrl)

    def assign(self, batch: Batch, scores: npt.NDArray[np.float64], minis: Sequence[MiniBatch]) -> CreditReport:
        """Set the advantages of the micro-batches of `minis` from `scores` [S], and their returns with `gae`.

        Needs proximal and reference log-probs where the KL is in the reward, and values with `gae`.
        """
        report = CreditReport()
        penalties = self._kl_in_reward(minis, report)
        sample_scores = torch.from_numpy(scores)
        if self._algorithm.adv_estimator in TOKEN_ESTIMATORS:
            raw = self._of_tokens(sample_scores, minis, penalties)
        else:
            raw = self._of_samples(batch, sample_scores, minis, penalties)
        micros = all_micros(minis)
        report.bad += _not_finite(micros, raw)
        report.usable = not self._ranks.any_of(bool(report.bad))
        if report.usable:
            if self._algorithm.adv_estimator in WHITENED:
                raw = whiten(raw, self._ranks.total)
            self._hand_out(minis, raw)
            self._describe(raw, report)
        return report

    def _kl_in_reward(self, minis: Sequence[MiniBatch], report: CreditReport) -> list[Tensor] | None:
        """What each token loses, [R] of each micro-batch, if the KL is in the reward; moves the coefficient on."""
        if not self._algorithm.use_kl_in_reward or self._algorithm.kl_ctrl.kl_coef == 0:
            return None
        estimator = KL_ESTIMATORS[self._algorithm.kl_penalty]
        kls: list[Tensor] = []
        means = torch.zeros(2, dtype=torch.float64)  # sum over samples of their mean, samples
        for mini in minis:
            for micro, proximal, reference in zip(mini.micros, mini.proximal, mini.reference, strict=True):
                assert proximal is not None, "the KL in the reward is held against proximal log-probs"
                assert reference is not None, "the KL in the reward is held against a reference"
                kl = estimator(proximal.double(), reference.double()).cpu()
                kls.append(kl)
                of_samples = torch.stack([p.mean() for p in kl.split(sample_lengths(micro))]) if len(kl) else kl
                means += torch.stack([of_samples.nan_to_num(0, 0, 0).sum(), torch.tensor(float(len(of_samples)))])
        coefficient = self.controller.coefficient
        total, num_samples = self._ranks.total(means).tolist()
        mean_kl = total / max(1.0, num_samples)
        report.metrics |= {"reward/kl_mean": mean_kl, "reward/kl_coefficient": coefficient}
        self.controller.update(mean_kl, int(num_samples))
        return [coefficient * kl for kl in kls]

    def _of_tokens(
        self, scores: Tensor, minis: Sequence[MiniBatch], penalties: Sequence[Tensor] | None
    ) -> list[Tensor]:
        parts: list[Tensor] = []
        for mini in minis:
            for i, micro in enumerate(mini.micros):
                rewards = _token_rewards(micro, scores, penalties[len(parts)] if penalties else None)
                values = mini.values[i].double().cpu() if self._algorithm.adv_estimator == "gae" else None
                parts.append(self._estimate(micro, rewards, values, mini))
        return parts

    def _estimate(self, micro: MicroBatch, rewards: Tensor, values: Tensor | None, mini: MiniBatch) -> Tensor:
        lengths, gamma = sample_lengths(micro), self._algorithm.gamma
        if values is None:
            return discounted_sums(rewards, lengths, gamma)
        result: AdvantagesAndReturns = gae(rewards, values, lengths, gamma, self._algorithm.lam)
        mini.returns.append(result.returns.float().to(micro.tokens.device))
        return result.advantages

    def _of_samples(
        self, batch: Batch, scores: Tensor, minis: Sequence[MiniBatch], penalties: Sequence[Tensor] | None
    ) -> list[Tensor]:
        micros = all_micros(minis)
        if penalties is not None:
            # The rest of a sample's group may be on another rank.
            lost = torch.zeros(len(scores), dtype=torch.float64)
            for micro, penalty in zip(micros, penalties, strict=True):
                lost.index_add_(0, micro.samples.cpu(), penalty)
            scores = scores - self._ranks.total(lost)
        groups = torch.from_numpy(batch.group_index.astype(np.int64))
        estimator = SAMPLE_ESTIMATORS[self._algorithm.adv_estimator]
        advantages = estimator(scores, groups, self._algorithm.norm_adv_by_std_in_grpo)
        return [advantages[micro.samples.cpu()] for micro in micros]

    def _hand_out(self, minis: Sequence[MiniBatch], advantages: Sequence[Tensor]) -> None:
        parts = iter(advantages)
        for mini in minis:
            mini.micros = [micro.with_advantages(next(parts)) for micro in mini.micros]

    def _describe(self, parts: Sequence[Tensor], report: CreditReport) -> None:
        values = torch.cat([torch.zeros(0, dtype=torch.float64), *parts])
        sums = torch.stack([torch.tensor(float(len(values))), values.sum(), values.square().sum()]).double()
        ends = torch.cat([values, torch.tensor([-torch.inf])]).max(), torch.cat([-values, torch.tensor([-torch.inf])])
        count, total, squares = self._ranks.total(sums).tolist()
        largest, negated = self._ranks.largest(torch.stack([ends[0], ends[1].max()])).tolist()
        if count:
            mean = total / count
            report.metrics |= {
                "advantage/mean": mean,
                "advantage/std": max(0.0, squares / count - mean**2) ** 0.5,
                "advantage/max": largest,
                "advantage/min": -negated,
            }


def _token_rewards(micro: MicroBatch, scores: Tensor, penalty: Tensor | None) -> Tensor:
    """Reward of each response token, [R] float64: the sample's score on its last, less `penalty` [R]."""
    rewards = torch.zeros(len(micro.samples), dtype=torch.float64)
    samples = micro.samples.cpu()
    if len(samples):
        last = torch.cat([samples[1:] != samples[:-1], torch.ones(1, dtype=torch.bool)])
        rewards[last] = scores[samples[last]]
    return rewards if penalty is None else rewards - penalty


def _not_finite(micros: Sequence[MicroBatch], parts: Sequence[Tensor]) -> list[int]:
    bad: list[int] = []
    for micro, part in zip(micros, parts, strict=True):
        broken = ~part.isfinite()
        if broken.any():
            bad += micro.samples.cpu()[broken].unique().tolist()
    return bad
