"""Advantages and returns by hand and by definition, groups of unequal size, and what leaves the update."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from protocol.settings.algorithm import KlCtrlSettings
from tests.trainer.factory import make_batch, make_settings
from trainer.advantages import group_baseline, grpo, rloo, whiten
from trainer.gae import discounted_sums, gae, value_loss
from trainer.kl import KlController
from trainer.metrics import update_metrics
from trainer.overlong import kept_samples, overlong_penalties, soft_penalty

UNTIMED = hypothesis_settings(deadline=None)  # the machine may be busy

GROUPS = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([-1.0, 0.0, 0.1, 1.0])), min_size=1, max_size=30)
SEGMENTS = st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=6), max_size=5)


def as_tensors(samples: list[tuple[int, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.tensor([score for _, score in samples], dtype=torch.float64)
    return scores, torch.tensor([group * 7 for group, _ in samples])


def test_worked_example() -> None:
    rewards = torch.tensor([0.9, 0.2, 0.8, 0.0], dtype=torch.float64)
    same = torch.zeros(4, dtype=torch.int64)
    assert rewards.mean() == pytest.approx(0.475), "the baseline"
    expected = torch.tensor([0.425, -0.275, 0.325, -0.475], dtype=torch.float64)
    torch.testing.assert_close(grpo(rewards, same, False), expected)
    torch.testing.assert_close(group_baseline(rewards, same, True), expected)
    torch.testing.assert_close(grpo(rewards, same, True), expected / (rewards.std() + 1e-6))
    torch.testing.assert_close(rloo(rewards, same, False), expected * 4 / 3)


@UNTIMED
@given(GROUPS, st.booleans())
def test_grpo_on_unequal_groups(samples: list[tuple[int, float]], by_std: bool) -> None:
    scores, index = as_tensors(samples)
    advantages = grpo(scores, index, by_std)
    for group in index.unique():
        mine, given_scores = advantages[index == group], scores[index == group]
        if len(mine) == 1:
            torch.testing.assert_close(mine, given_scores / (1 + 1e-6) if by_std else given_scores)
        else:
            centred = given_scores - given_scores.mean()
            expected = centred / (given_scores.std() + 1e-6) if by_std else centred
            torch.testing.assert_close(mine, expected, atol=1e-9, rtol=1e-6)


@UNTIMED
@given(GROUPS)
def test_rloo_takes_the_others_of_the_group_for_a_baseline(samples: list[tuple[int, float]]) -> None:
    scores, index = as_tensors(samples)
    advantages = rloo(scores, index, True)
    for i, (group, score) in enumerate(samples):
        others = [s for j, (g, s) in enumerate(samples) if g == group and j != i]
        assert float(advantages[i]) == pytest.approx(score - (np.mean(others) if others else 0), abs=1e-12)


def test_equal_scores_have_an_advantage_of_exactly_zero() -> None:
    scores, index = torch.full((8,), 0.1, dtype=torch.float64), torch.zeros(8, dtype=torch.int64)
    assert grpo(scores, index, True).abs().max() < 1e-9


@UNTIMED
@given(SEGMENTS, st.floats(0.1, 1), st.floats(0, 1))
def test_gae_is_its_definition(samples: list[list[float]], gamma: float, lam: float) -> None:
    lengths = [len(s) for s in samples]
    rewards = torch.tensor([r for s in samples for r in s], dtype=torch.float64)
    values = torch.sin(torch.arange(len(rewards), dtype=torch.float64))
    result = gae(rewards, values, lengths, gamma, lam)
    start = 0
    for length in lengths:
        for t in range(length):
            total = 0.0
            for k in range(t, length):
                following = values[start + k + 1] if k + 1 < length else 0.0
                delta = rewards[start + k] + gamma * following - values[start + k]
                total += float((gamma * lam) ** (k - t) * delta)
            assert float(result.advantages[start + t]) == pytest.approx(total, abs=1e-9)
        start += length
    torch.testing.assert_close(result.returns, result.advantages + values)


def test_gae_of_lambda_one_learns_the_discounted_return_whatever_the_critic_says() -> None:
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.0, 2.0], dtype=torch.float64)
    result = gae(rewards, torch.randn(5, dtype=torch.float64), [3, 2], 0.5, 1.0)
    torch.testing.assert_close(result.returns, torch.tensor([0.25, 0.5, 1.0, 1.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(discounted_sums(rewards, [3, 2], 0.5), result.returns)


def test_the_value_clip_bounds_one_update() -> None:
    old, returns = torch.zeros(3), torch.tensor([1.0, 1.0, -1.0])
    values = torch.tensor([0.1, 0.9, 0.9], requires_grad=True)
    losses = value_loss(values, old, returns, 0.2)
    losses.loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.9, 0.0, 1.9]), "no pull beyond the clip; back from the wrong side"
    assert losses.clipped.tolist() == [False, True, False]


@UNTIMED
@given(st.lists(st.floats(-3, 3), min_size=2, max_size=20), st.integers(1, 4))
def test_whitening_is_over_all_parts(values: list[float], num_parts: int) -> None:
    whole = torch.tensor(values, dtype=torch.float64)
    parts = whiten([p.clone() for p in whole.tensor_split(num_parts)], lambda sums: sums)
    expected = (whole - whole.mean()) / (whole.var() + 1e-8).sqrt()
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-6, rtol=1e-6)


def test_soft_penalty_by_hand() -> None:
    """Of 100 tokens the last 20 cost: none at 80, half at 90, all at 100."""
    lengths = np.asarray([10, 80, 81, 90, 100])
    assert soft_penalty(lengths, 100, 20, 1.0).tolist() == pytest.approx([0, 0, -0.05, -0.5, -1])
    assert soft_penalty(lengths, 100, 20, 0.5).tolist() == pytest.approx([0, 0, -0.025, -0.25, -0.5])
    assert soft_penalty(lengths, 100, 0, 1.0).tolist() == [0, 0, 0, 0, 0]


def test_penalties_are_reported_apart_and_truncated_samples_may_be_left_out(tmp_path: Path) -> None:
    batch = make_batch(max_length=60)
    settings = make_settings(tmp_path, tmp_path, algorithm={"overlong_buffer_len": 30, "mask_truncated": True})
    lengths = np.diff(batch.sample_offsets) - batch.prompt_lengths
    penalties = overlong_penalties(batch, settings)
    assert (penalties < 0).tolist() == (lengths > 34).tolist()
    keep = kept_samples(batch, batch.rewards + penalties, settings)
    assert keep.tolist() == [i % 2 == 1 for i in range(16)], "the factory ends every other sample by length"
    metrics = update_metrics(batch, penalties, keep)
    assert metrics["reward/overlong_penalty"] == pytest.approx(penalties.mean())
    assert metrics["samples/left_out"] == 8


def test_groups_without_spread_are_kept_or_filtered_whole(tmp_path: Path) -> None:
    batch = make_batch()
    rewards = np.arange(16, dtype=np.float32)
    rewards[batch.group_index == 1] = 3.0
    batch = replace(batch, rewards=rewards)
    scores = rewards.astype(np.float64)
    kept = make_settings(tmp_path, tmp_path)
    filtered = make_settings(tmp_path, tmp_path, algorithm={"groups_without_spread": "filter"})
    assert kept_samples(batch, scores, kept).all()
    assert kept_samples(batch, scores, filtered).tolist() == (batch.group_index != 1).tolist()
    scores[batch.group_index == 1] = np.nan
    assert kept_samples(batch, scores, filtered).all(), "what is no number must be noticed, not filtered"
    scores[batch.group_index == 1] = np.inf
    assert kept_samples(batch, scores, filtered).all()


def test_the_adaptive_controller_follows_and_a_fixed_one_stays() -> None:
    adaptive = KlController(KlCtrlSettings(type="adaptive", kl_coef=0.1, target_kl=0.1, horizon=1000))
    adaptive.update(0.11, 100)
    assert adaptive.coefficient == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    adaptive.update(50.0, 100)
    assert adaptive.coefficient == pytest.approx(0.1 * 1.01 * (1 + 0.2 * 0.1)), "one step of a wild KL is bounded"
    fixed = KlController(KlCtrlSettings(kl_coef=0.1))
    fixed.update(50.0, 100)
    fixed.load_state(adaptive.state())
    assert fixed.coefficient == 0.1
