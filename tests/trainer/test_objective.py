"""The loss of a micro-batch: weights, gradients at their edges; and updates that are skipped."""

from pathlib import Path

import numpy as np
import pytest
import torch

from protocol.settings.trainer import OptimSettings
from tests.trainer.factory import make_batch, make_settings
from trainer.aggregation import COEFFICIENTS, Counts
from trainer.corrections import Corrector
from trainer.losses import POLICY_LOSSES, Clip, PolicyInputs, ppo_clip
from trainer.model import PolicyModel, load_policy
from trainer.objective import SUM_NAMES, Anchors, make_objective
from trainer.optimizer import FiniteWatch, SkippableAdamW
from trainer.packing import pack
from trainer.spans import make_spans


@pytest.fixture
def policy(tiny_model_dir: Path, tmp_path: Path) -> PolicyModel:
    return load_policy(make_settings(tiny_model_dir, tmp_path), tiny_model_dir, torch.device("cpu")).double()


def test_decoupled_gradient_is_the_weighted_policy_gradient(
    policy: PolicyModel, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """At π = p inside the clip the loss is −w·A and its gradient that of −w·A·log π."""
    objective = make_objective(make_settings(tiny_model_dir, tmp_path))
    batch = make_batch()
    advantages = np.linspace(-1, 1, batch.num_samples).astype(np.float32)
    micro = pack(batch, range(6), advantages)
    out = policy(micro)
    anchors = Anchors(out.logprobs.detach(), None)
    counts = objective.counts(len(micro.targets), 6)
    loss = objective.loss(out, micro, anchors, counts, 0).loss
    weights = (anchors.proximal - micro.behaviour.double()).exp().clamp(max=2)
    direct = -(weights * micro.advantages * out.logprobs).mean()
    ours = torch.autograd.grad(loss, list(policy.parameters()), retain_graph=True)
    theirs = torch.autograd.grad(direct, list(policy.parameters()))
    torch.testing.assert_close(ours, theirs)
    halved = objective.loss(policy(micro), micro, anchors, counts, 0, mean_weight=2.0)
    torch.testing.assert_close(halved.loss, loss / 2)


def test_what_is_left_out_keeps_its_place_in_the_mean(
    policy: PolicyModel, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """A rejected sample adds nothing to the policy loss, and the others count as much as before; entropy stays."""
    batch = make_batch()
    micro = pack(batch, range(4), np.ones(batch.num_samples, np.float32))
    behaviour = policy(micro).logprobs.detach().float()
    behaviour[micro.samples == 2] -= 5.0
    micro.behaviour.copy_(behaviour)
    losses: dict[str, torch.Tensor] = {}
    for rejection in ("none", "k1"):
        settings = make_settings(
            tiny_model_dir,
            tmp_path,
            algorithm={"rejection": rejection, "rejection_upper": 1.5},
            actor={"entropy_coeff": 0.1},
        )
        objective = make_objective(settings)
        out = policy(micro)
        result = objective.loss(out, micro, Anchors(out.logprobs.detach(), None), objective.counts(100, 4), 0)
        losses[rejection] = result.per_token
        assert result.loss.item() == pytest.approx(float(result.per_token.sum()) / 100)
        sums = dict(zip(SUM_NAMES, result.sums.tolist(), strict=True))
        assert sums["left_out"] == (int((micro.samples == 2).sum()) if rejection == "k1" else 0)
        assert sums["tokens"] == len(micro.targets)
    others = micro.samples != 2
    torch.testing.assert_close(losses["k1"][others], losses["none"][others])
    entropy = policy(micro).entropy.detach()
    torch.testing.assert_close(losses["k1"][~others], -0.1 * entropy[~others])


def test_aggregations_by_hand() -> None:
    lengths = torch.tensor([2.0, 2.0, 1.0, 3.0, 3.0, 3.0])
    counts = Counts(num_tokens=6, num_samples=3, scale=10.0)
    expected = {
        "token-mean": [1 / 6] * 6,
        "seq-mean-token-sum": [1 / 3] * 6,
        "seq-mean-token-mean": [1 / 6, 1 / 6, 1 / 3, 1 / 9, 1 / 9, 1 / 9],
        "seq-mean-token-sum-norm": [1 / 30] * 6,
    }
    assert set(expected) == set(COEFFICIENTS)
    for mode, coefficients in expected.items():
        torch.testing.assert_close(COEFFICIENTS[mode](lengths, counts), torch.tensor(coefficients))


def test_extreme_ratios_stay_finite() -> None:
    logprobs = torch.tensor([-500.0, 0.0, -1.0], requires_grad=True)
    inputs = PolicyInputs(logprobs, torch.tensor([0.0, -500.0, -1.0]), torch.tensor([-1.0, -1.0, 1.0]))
    spans = make_spans(torch.zeros(3, dtype=torch.int64), torch.zeros(3), "sequence")
    losses = ppo_clip(inputs, Clip(0.2, 0.2, 3.0), spans)
    losses.loss.sum().backward()
    assert losses.loss.isfinite().all()
    assert losses.loss[1] == 3.0, "the dual clip bounds what a negative advantage can cost"
    assert losses.dual_clipped.tolist() == [False, True, False]
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("level", ["token", "version_run", "sequence"])
def test_thousands_of_tokens_far_off_policy_stay_finite(name: str, level: str) -> None:
    """Sums of log-ratios over a long response overflow any exponential: they are clamped, too."""
    length = 4000
    logprobs = (-torch.rand(length, generator=torch.Generator().manual_seed(0)) * 3).requires_grad_()
    samples, versions = torch.zeros(length, dtype=torch.int64), torch.arange(length) // 1000
    for shift in (-2.0, 2.0):
        old = logprobs.detach() + shift
        spans = make_spans(samples, versions, "sequence")
        losses = POLICY_LOSSES[name](PolicyInputs(logprobs, old, torch.ones(length)), Clip(0.2, 0.2, 3.0), spans)
        weights = Corrector(level=level).weigh(logprobs.detach(), old, samples, versions)  # pyright: ignore[reportArgumentType]
        (gradient,) = torch.autograd.grad((losses.loss * weights.weight).mean(), logprobs)
        assert weights.raw.isfinite().all()
        assert losses.loss.isfinite().all()
        assert gradient.isfinite().all()


def test_a_skipped_update_changes_neither_weights_nor_moments() -> None:
    layer = torch.nn.Linear(3, 2)
    optimizer = SkippableAdamW(layer.parameters(), OptimSettings(lr=0.1), max_norm=1.0)
    watch = FiniteWatch(layer)
    layer(torch.ones(1, 3)).sum().backward()
    assert watch.take()
    optimizer.step()
    before = [p.detach().clone() for p in layer.parameters()]
    moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
    (layer(torch.ones(1, 3)).sum() * float("inf")).backward()
    assert not watch.take()
    optimizer.skip_update = True
    optimizer.step()
    torch.testing.assert_close(list(layer.parameters()), before, rtol=0, atol=0)
    torch.testing.assert_close([s["exp_avg"] for s in optimizer.state.values()], moments, rtol=0, atol=0)


def test_the_ratio_of_a_sequence_is_over_the_tokens_that_count() -> None:
    spans = make_spans(torch.zeros(4, dtype=torch.int64), torch.zeros(4), "sequence")
    logprobs, advantages = torch.full((4,), -1.0), -torch.ones(4)
    old = torch.tensor([-1.0, -1.5, -1.5, -1.0])
    counted = torch.tensor([False, True, True, False])
    inputs = PolicyInputs(logprobs, old, advantages, counted)
    loss = POLICY_LOSSES["gspo"](inputs, Clip(0.2, 0.2, 3.0), spans).loss
    torch.testing.assert_close(loss, torch.full((4,), 0.5).exp())
