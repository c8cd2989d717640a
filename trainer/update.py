"""One batch becomes optimizer updates.

Always true: all ranks run the same number of forward and backward passes and updates; the proximal log-probs are
those of the weights at the start of the batch (with a single update they are the first forward pass itself, which is
exactly equal, so no pass is spent on them); an update whose loss or gradient is not finite is left out on every rank
together, its samples are named, and the batch counts as trained.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocol.batch import Batch
from protocol.errors import DataError
from protocol.failpoints import Failpoint, failpoint
from protocol.settings import RunSettings
from trainer.advantages import ADVANTAGE_ESTIMATORS, Estimator
from trainer.distributed import Ranks
from trainer.engine import PolicyEngine
from trainer.metrics import token_metrics
from trainer.objective import MAX_NAMES, SUM_NAMES, Anchors, make_objective
from trainer.optimizer import learning_rate
from trainer.packing import Bounds, MicroBatch, mini_batches, num_trained_tokens, pack, plan_ranks
from trainer.reference import ReferencePolicy

LOG = logging.getLogger("april.trainer")


@dataclass(slots=True)
class MiniBatch:
    """This rank's part of one optimizer update; `num_tokens` is of the update over all ranks.

    `proximal` and `reference`: log-probs [R] of each micro-batch, None where they are not known or not wanted.
    """

    micros: list[MicroBatch]
    num_tokens: int
    proximal: list[Tensor | None]
    reference: list[Tensor | None]


@dataclass(slots=True)
class UpdateReport:
    """What became of one batch. `metrics` are over all ranks; `timings` are seconds."""

    num_updates: int = 0
    num_skipped: int = 0
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    timings: dict[str, float] = field(default_factory=dict[str, float])


class Updater:
    """Trains on batches; every rank calls it with the same batch."""

    def __init__(
        self, settings: RunSettings, engine: PolicyEngine, reference: ReferencePolicy | None, ranks: Ranks
    ) -> None:
        self._optim = settings.actor.optim
        self._epochs = settings.actor.ppo_epochs
        self._mini_batch_size = settings.actor.ppo_mini_batch_size or settings.data.train_batch_size
        self._bounds = Bounds(settings.actor.ppo_max_token_len_per_gpu, settings.actor.ppo_micro_batch_size_per_gpu)
        self._estimator = ADVANTAGE_ESTIMATORS[settings.algorithm.adv_estimator]
        self._by_std = settings.algorithm.norm_adv_by_std_in_grpo
        self._objective = make_objective(settings)
        self._engine = engine
        self._reference = reference
        self._ranks = ranks

    def run(self, batch: Batch, step: int, held_version: int) -> UpdateReport:
        """Train on `batch`; `held_version` is the policy version that the weights are."""
        check_batch(batch, self._engine)
        minis = self._split(batch)
        report = UpdateReport()
        lr = learning_rate(self._optim, step)
        began = time.perf_counter()
        self._log_probs_ahead(minis)
        report.timings["logprobs"] = time.perf_counter() - began
        failpoint(Failpoint.MID_STEP)
        began = time.perf_counter()
        sums, maxima = torch.zeros(len(SUM_NAMES)).double(), torch.zeros(len(MAX_NAMES)).double()
        norms: list[float] = []
        for _ in range(self._epochs):
            for mini in minis:
                bad = self._accumulate(mini, held_version, sums, maxima)
                skip = self._ranks.any_of(bool(bad))
                norms.append(self._engine.update(lr, skip))
                report.num_skipped += skip
                report.num_updates += not skip
                if bad:
                    _name_bad_samples(batch, step, bad)
        report.timings["update"] = time.perf_counter() - began
        finite = [n for n in norms if np.isfinite(n)]
        report.metrics = token_metrics(self._ranks.total(sums), self._ranks.largest(maxima)) | {
            "actor/lr": lr,
            "actor/grad_norm": float(np.mean(finite)) if finite else float("nan"),
        }
        return report

    def _split(self, batch: Batch) -> list[MiniBatch]:
        advantages = batch_advantages(batch, self._estimator, self._by_std)
        lengths = np.diff(batch.sample_offsets)
        minis: list[MiniBatch] = []
        for samples in mini_batches(batch.group_index, self._mini_batch_size):
            bins = plan_ranks([int(lengths[i]) for i in samples], self._bounds, self._ranks.size)[self._ranks.rank]
            packed = [pack(batch, [samples[i] for i in b], advantages).to(self._engine.device) for b in bins]
            unknown: list[Tensor | None] = [None] * len(packed)
            num_tokens = max(1, num_trained_tokens(batch, samples))
            minis.append(MiniBatch(packed, num_tokens, unknown, unknown.copy()))
        return minis

    def _log_probs_ahead(self, minis: Sequence[MiniBatch]) -> None:
        """What must be known before the first update; proximal ones only where the first pass does not tell them."""
        if self._objective.needs_proximal and len(minis) * self._epochs > 1:
            self._engine.train(False)
            for mini in minis:
                mini.proximal[:] = [self._engine.logprobs(m) for m in mini.micros]
            self._engine.train(True)
        if self._reference is not None:
            for mini in minis:
                mini.reference[:] = self._reference.logprobs(mini.micros)

    def _accumulate(self, mini: MiniBatch, held_version: int, sums: Tensor, maxima: Tensor) -> list[int]:
        """Add up the gradient of one update; returns the samples where loss or gradient is not finite."""
        bad: list[int] = []
        for i, micro in enumerate(mini.micros):
            out = self._engine.forward(micro)
            proximal = mini.proximal[i]
            if proximal is None:
                proximal = mini.proximal[i] = out.logprobs.detach()
            anchors = Anchors(proximal, mini.reference[i])
            result = self._objective.loss(out, micro, anchors, mini.num_tokens, held_version)
            finite = self._engine.backward(result.loss)
            bad += _bad_samples(micro, result.per_token, finite)
            sums += result.sums
            torch.maximum(maxima, result.maxima, out=maxima)
        return bad


def batch_advantages(batch: Batch, estimator: Estimator, by_std: bool) -> npt.NDArray[np.float32]:
    """Advantages [S], worked out in float64: equal rewards then have a deviation of exactly zero."""
    rewards = torch.from_numpy(batch.rewards.astype(np.float64))
    groups = torch.from_numpy(batch.group_index.astype(np.int64))
    return estimator(rewards, groups, by_std).numpy().astype(np.float32)


def check_batch(batch: Batch, engine: PolicyEngine) -> None:
    """Raise `DataError` if `batch` was made for another model."""
    policy = engine.policy
    if len(batch.tokens) and (batch.tokens.min() < 0 or batch.tokens.max() >= policy.vocabulary_size):
        raise DataError(
            f"the batch has token id {batch.tokens.max()} and the model knows {policy.vocabulary_size}: "
            "the service runs another model; give both the same model.path"
        )
    longest = int(np.diff(batch.sample_offsets).max(initial=0))
    if policy.context_length is not None and longest > policy.context_length:
        raise DataError(
            f"a sample has {longest} tokens and the model's context is {policy.context_length}: "
            "lower data.max_prompt_length or data.max_response_length"
        )


def _bad_samples(micro: MicroBatch, per_token: Tensor, finite_gradient: bool) -> list[int]:
    broken = ~per_token.isfinite()
    if broken.any():
        return micro.samples[broken].unique().tolist()
    return [] if finite_gradient else list(micro.sample_indices)


def _name_bad_samples(batch: Batch, step: int, bad: Sequence[int]) -> None:
    names = ", ".join(batch.header.samples[i].sample_id for i in sorted(set(bad)))
    LOG.error("step %d: loss or gradient is not finite for sample %s; the update is skipped", step, names)
