"""One batch becomes optimizer updates.

Always true: all ranks run the same number of forward and backward passes and updates; the proximal log-probs are
those of the weights at the start of the batch (with a single update they are the first forward pass itself, which is
exactly equal, so no pass is spent on them) or interpolated to them; an update whose loss, gradient or advantage is not
finite is left out on every rank together, its samples are named, and the batch counts as trained; a batch that leaves
nothing to train on is trained with no update.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from protocol.batch import Batch
from protocol.failpoints import Failpoint, failpoint
from protocol.settings import RunSettings
from trainer.batch_checks import check_batch
from trainer.credit import CreditAssigner
from trainer.distributed import Ranks
from trainer.engine import PolicyEngine
from trainer.interfaces import Reference, ValueModel
from trainer.metrics import token_metrics, update_metrics
from trainer.mini_batch import MiniBatch, all_micros, split_batch
from trainer.objective import MAX_NAMES, SUM_NAMES, Anchors, make_objective
from trainer.overlong import kept_samples, overlong_penalties
from trainer.packing import MicroBatch, micro_batch_bounds

LOG = logging.getLogger("april.trainer")


@dataclass(slots=True)
class UpdateReport:
    """What became of one batch. `metrics` are over all ranks; `timings` are seconds."""

    num_updates: int = 0
    num_skipped: int = 0
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    timings: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(slots=True)
class _Sums:
    """Over the micro-batches of this rank, by SUM_NAMES and MAX_NAMES."""

    sums: Tensor = field(default_factory=lambda: torch.zeros(len(SUM_NAMES), dtype=torch.float64))
    maxima: Tensor = field(default_factory=lambda: torch.full((len(MAX_NAMES),), -torch.inf, dtype=torch.float64))


class Updater:
    """Trains on batches; every rank calls it with the same batch."""

    def __init__(
        self,
        settings: RunSettings,
        engine: PolicyEngine,
        reference: Reference | None,
        ranks: Ranks,
        critic: ValueModel | None = None,
    ) -> None:
        self._settings = settings
        self._mini_batch_size = settings.actor.ppo_mini_batch_size or settings.data.train_batch_size
        self._bounds = micro_batch_bounds(settings.actor, padded=not settings.model.use_remove_padding)
        self._objective = make_objective(settings)
        self._credit = CreditAssigner(settings, ranks)
        self._engine = engine
        self._reference = reference
        self._critic = critic
        self._ranks = ranks
        assert (critic is not None) == (settings.algorithm.adv_estimator == "gae"), "gae alone has a critic"

    def state(self) -> dict[str, float]:
        """What a checkpoint must keep besides weights and optimizers."""
        return self._credit.controller.state()

    def load_state(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` gave."""
        self._credit.controller.load_state(state)

    def run(self, batch: Batch, step: int, held_version: int) -> UpdateReport:
        """Train on `batch`; `held_version` is the policy version that the weights are."""
        check_batch(batch, self._engine.policy, self._objective.correction)
        penalties = overlong_penalties(batch, self._settings)
        scores = batch.rewards.astype(np.float64) + penalties
        keep = kept_samples(batch, scores, self._settings)
        minis = split_batch(batch, keep, self._mini_batch_size, self._bounds, self._ranks, self._engine.device)
        report = UpdateReport(metrics=update_metrics(batch, penalties, keep))
        began = time.perf_counter()
        self._look_ahead(minis)
        report.timings["logprobs"] = time.perf_counter() - began
        failpoint(Failpoint.MID_STEP)
        credit = self._credit.assign(batch, scores, minis)
        report.metrics |= credit.metrics
        if not credit.usable:
            report.num_skipped = len(minis) * self._settings.actor.ppo_epochs
            _name_bad_samples(batch, step, credit.bad)
            return report
        began = time.perf_counter()
        self._update_critic(minis, step, report)
        report.timings["critic"] = time.perf_counter() - began
        if self._critic is None or step > self._settings.trainer.critic_warmup:
            self._update_policy(batch, minis, step, held_version, report)
        report.timings["update"] = time.perf_counter() - began
        return report

    def _look_ahead(self, minis: Sequence[MiniBatch]) -> None:
        """What must be known before the first update; proximal ones only where the first pass does not tell them."""
        objective = self._objective
        several = len(minis) * self._settings.actor.ppo_epochs > 1
        if (objective.needs_proximal and several) or objective.normalises or objective.kl_in_reward:
            self._engine.train(False)
            for mini in minis:
                mini.proximal[:] = [self._engine.logprobs(m) for m in mini.micros]
            self._engine.train(True)
        micros = all_micros(minis)
        # One call for the whole batch: a model that is offloaded between uses moves once.
        references = iter(self._reference.logprobs(micros) if self._reference is not None else [])
        values = iter(self._critic.values(micros) if self._critic is not None else [])
        for mini in minis:
            if self._reference is not None:
                mini.reference[:] = islice(references, len(mini.micros))
            mini.values = list(islice(values, len(mini.micros)))
            if objective.normalises:
                mini.mean_weight = self._mean_weight(mini)

    def _mean_weight(self, mini: MiniBatch) -> float:
        """Mean of the weights of the mini-batch over all ranks; 1 where all of them are 0."""
        sums = torch.zeros(2, dtype=torch.float64)
        for micro, proximal in zip(mini.micros, mini.proximal, strict=True):
            assert proximal is not None, "weights are of proximal log-probs that were computed ahead"
            weights = self._objective.weigh(proximal, micro)
            sums += torch.tensor([float(weights.total), float(weights.num_weights)], dtype=torch.float64)
        total, count = self._ranks.total(sums).tolist()
        return total / count if total > 0 else 1.0

    def _update_critic(self, minis: Sequence[MiniBatch], step: int, report: UpdateReport) -> None:
        if self._critic is None:
            return
        collected: list[dict[str, float]] = []
        for _ in range(self._settings.actor.ppo_epochs):
            collected += [self._critic.update(m.micros, m.returns, m.values, m.num_tokens, step) for m in minis]
        for name in {name for metrics in collected for name in metrics}:
            report.metrics[name] = float(np.mean([metrics[name] for metrics in collected if name in metrics]))

    def _update_policy(
        self,
        batch: Batch,
        minis: Sequence[MiniBatch],
        step: int,
        held_version: int,
        report: UpdateReport,
    ) -> None:
        over, lr = _Sums(), self._engine.learning_rate(step)
        norms: list[float] = []
        planned = len(minis) * self._settings.actor.ppo_epochs
        for number in range(planned):
            mini = minis[number % len(minis)]
            bad = self._accumulate(mini, held_version, number / planned, over)
            skip = self._ranks.any_of(bool(bad))
            norms.append(self._engine.update(lr, skip))
            report.num_skipped += skip
            report.num_updates += not skip
            if bad:
                _name_bad_samples(batch, step, bad)
        finite = [n for n in norms if np.isfinite(n)]
        report.metrics |= token_metrics(self._ranks.total(over.sums), self._ranks.largest(over.maxima)) | {
            "actor/lr": lr,
            "actor/grad_norm": float(np.mean(finite)) if finite else float("nan"),
        }

    def _accumulate(self, mini: MiniBatch, held_version: int, progress: float, over: _Sums) -> list[int]:
        """Add up the gradient of one update; returns the samples where loss or gradient is not finite."""
        bad: list[int] = []
        counts = self._objective.counts(mini.num_tokens, mini.num_samples)
        for i, micro in enumerate(mini.micros):
            out = self._engine.forward(micro)
            proximal = mini.proximal[i]
            if proximal is None:
                proximal = self._objective.proximal(out.logprobs, micro, held_version, progress)
                if not self._objective.interpolates:
                    mini.proximal[i] = proximal
            anchors = Anchors(proximal, mini.reference[i])
            result = self._objective.loss(out, micro, anchors, counts, held_version, mini.mean_weight)
            finite = self._engine.backward(result.loss)
            bad += _bad_samples(micro, result.per_token, finite)
            over.sums += result.sums
            torch.maximum(over.maxima, result.maxima, out=over.maxima)
        return bad


def _bad_samples(micro: MicroBatch, per_token: Tensor, finite_gradient: bool) -> list[int]:
    broken = ~per_token.isfinite()
    if broken.any():
        return micro.samples[broken].unique().tolist()
    return [] if finite_gradient else list(micro.sample_indices)


def _name_bad_samples(batch: Batch, step: int, bad: Sequence[int]) -> None:
    names = ", ".join(batch.header.samples[i].sample_id for i in sorted(set(bad))) or "of another rank"
    LOG.error("step %d: loss or gradient is not finite for sample %s; the update is skipped", step, names)
