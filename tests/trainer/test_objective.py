"""The same loss and gradient for every split, and advantages, weights and schedules at their edges."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.settings.trainer import Correction, OptimSettings
from tests.trainer.factory import make_batch, make_settings
from trainer.advantages import grpo
from trainer.corrections import token_tis, weight_stats
from trainer.losses import Clip, ppo_clip
from trainer.model import PolicyModel, load_policy
from trainer.objective import SUM_NAMES, Anchors, make_objective
from trainer.optimizer import FiniteWatch, SkippableAdamW, learning_rate
from trainer.packing import Bounds, num_trained_tokens, pack, plan_ranks

EVERYTHING = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.01}


@pytest.fixture
def policy(tiny_model_dir: Path, tmp_path: Path) -> PolicyModel:
    return load_policy(make_settings(tiny_model_dir, tmp_path), tiny_model_dir, torch.device("cpu")).double()


@pytest.mark.parametrize("correction", list(Correction))
def test_loss_and_gradient_are_the_same_for_any_split(
    policy: PolicyModel, tiny_model_dir: Path, tmp_path: Path, correction: Correction
) -> None:
    settings = make_settings(tiny_model_dir, tmp_path, algorithm={"correction": correction}, actor=EVERYTHING)
    objective = make_objective(settings)
    batch = make_batch(num_groups=3, version=2)
    advantages = np.random.default_rng(0).normal(size=batch.num_samples).astype(np.float32)
    lengths = np.diff(batch.sample_offsets).tolist()
    num_tokens = num_trained_tokens(batch, range(batch.num_samples))
    results: list[tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]] = []
    for bounds, num_ranks in [(Bounds(10_000), 1), (Bounds(100), 1), (Bounds(60, 2), 2), (Bounds(1), 3)]:
        policy.zero_grad()
        total, sums = torch.zeros((), dtype=torch.float64), torch.zeros(len(SUM_NAMES), dtype=torch.float64)
        for bins in plan_ranks(lengths, bounds, num_ranks):
            for indices in bins:
                micro = pack(batch, indices, advantages)
                out = policy(micro)
                # Proximal and reference policies that differ from the current one, the same for every split.
                shift = 0.3 * torch.sin(micro.targets.double())
                anchors = Anchors(out.logprobs.detach() + shift, out.logprobs.detach() - shift)
                part = objective.loss(out, micro, anchors, num_tokens, held_version=2)
                part.loss.backward()
                total, sums = total + part.loss.detach(), sums + part.sums
        results.append((total, [p.grad.clone() for p in policy.parameters() if p.grad is not None], sums))
    assert any(g.abs().max() > 1e-3 for g in results[0][1])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-6, atol=1e-10)
    assert results[0][2][0] == num_tokens


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
    loss = objective.loss(out, micro, anchors, len(micro.targets), 0).loss
    weights = token_tis(anchors.proximal, micro.behaviour.double(), 2.0)
    direct = -(weights * micro.advantages * out.logprobs).mean()
    ours = torch.autograd.grad(loss, list(policy.parameters()), retain_graph=True)
    theirs = torch.autograd.grad(direct, list(policy.parameters()))
    torch.testing.assert_close(ours, theirs)


def test_worked_example() -> None:
    rewards = torch.tensor([0.9, 0.2, 0.8, 0.0], dtype=torch.float64)
    same = torch.zeros(4, dtype=torch.int64)
    expected = torch.tensor([0.425, -0.275, 0.325, -0.475], dtype=torch.float64)
    torch.testing.assert_close(grpo(rewards, same, False), expected)
    torch.testing.assert_close(grpo(rewards, same, True), expected / (rewards.std() + 1e-6))


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([-1.0, 0.0, 0.1, 1.0])), min_size=1, max_size=30),
    st.booleans(),
)
def test_grpo_on_unequal_groups(samples: list[tuple[int, float]], by_std: bool) -> None:
    index = torch.tensor([g * 7 for g, _ in samples])
    rewards = torch.tensor([r for _, r in samples], dtype=torch.float64)
    advantages = grpo(rewards, index, by_std)
    for group in index.unique():
        mine, given_rewards = advantages[index == group], rewards[index == group]
        if len(mine) == 1:
            torch.testing.assert_close(mine, given_rewards / (1 + 1e-6) if by_std else given_rewards)
        else:
            centred = given_rewards - given_rewards.mean()
            expected = centred / (given_rewards.std() + 1e-6) if by_std else centred
            torch.testing.assert_close(mine, expected, atol=1e-9, rtol=1e-6)


def test_extreme_ratios_stay_finite() -> None:
    logprobs = torch.tensor([-500.0, 0.0, -1.0], requires_grad=True)
    losses = ppo_clip(logprobs, torch.tensor([0.0, -500.0, -1.0]), torch.tensor([-1.0, -1.0, 1.0]), Clip(0.2, 0.2, 3.0))
    losses.loss.sum().backward()
    assert losses.loss.isfinite().all()
    assert losses.loss[1] == 3.0, "the dual clip bounds what a negative advantage can cost"
    assert losses.dual_clipped.tolist() == [False, True, False]
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


def test_weight_statistics() -> None:
    same = torch.full((8,), -1.0)
    on_policy = weight_stats(same, same, 2.0)
    assert on_policy.mean == 1
    assert on_policy.effective_sample_share == 1
    assert on_policy.clipped_share == 0
    off = weight_stats(torch.tensor([0.0, 0.0]), torch.tensor([-torch.log(torch.tensor(3.0)).item(), 0.0]), 2.0)
    assert off.mean == pytest.approx(2)
    assert off.largest == pytest.approx(3)
    assert off.clipped_share == 0.5
    assert off.effective_sample_share == pytest.approx(16 / 20)
    assert weight_stats(torch.zeros(0), torch.zeros(0), 2.0).largest == 0


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


def test_warm_up_is_linear() -> None:
    optim = OptimSettings(lr=1.0, lr_warmup_steps=4)
    assert [learning_rate(optim, step) for step in (1, 2, 4, 9)] == [0.25, 0.5, 1.0, 1.0]
    assert learning_rate(OptimSettings(lr=0.5), 1) == 0.5
