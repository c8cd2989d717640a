"""The critic learns values, clips them as stated, survives a checkpoint and leaves bad updates out."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.factory import make_settings
from tests.trainer.rank_cases import Case, micro_batches, run_case
from trainer.critic import Critic
from trainer.deepspeed_config import start_deepspeed
from trainer.distributed import Ranks
from trainer.packing import MicroBatch

GAE: dict[str, Any] = {"algorithm": {"adv_estimator": "gae"}}
pytestmark = pytest.mark.filterwarnings("ignore:.torch.*is deprecated")


def make_critic(model_dir: Path, folder: Path, zero_stage: int = 0, **critic: Any) -> Critic:
    sections = GAE | {"critic": {"optim": {"lr": 3e-3}} | critic, "deepspeed": {"zero_stage": zero_stage}}
    device = start_deepspeed()
    return Critic(make_settings(model_dir, folder, **sections), Ranks(30), device)


def parity(micro: MicroBatch) -> torch.Tensor:
    """A return that the state before each response token tells: whether its last token is odd."""
    return (micro.tokens[micro.predictors] % 2).float()


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_learns_a_value_that_the_state_tells(tiny_model_dir: Path, tmp_path: Path, zero_stage: int) -> None:
    critic = make_critic(tiny_model_dir, tmp_path, zero_stage)
    first = last = {}
    for step in range(1, 26):
        micros, num_tokens = micro_batches(step, Ranks(30))
        old = critic.values(micros)
        if step == 1:
            assert not torch.cat(old).any(), "a fresh head says 0 everywhere"
        assert [len(v) for v in old] == [len(m.targets) for m in micros]
        last = critic.update(micros, [parity(m) for m in micros], old, num_tokens, step)
        first = first or last
    assert first["critic/vf_loss"] == pytest.approx(0.5 * first["critic/returns_mean"], rel=1e-5)
    assert first["critic/explained_variance"] == pytest.approx(0, abs=1e-6)
    unseen, _ = micro_batches(1000, Ranks(30))
    wrong = torch.cat([(v - parity(m)).square() for v, m in zip(critic.values(unseen), unseen, strict=True)])
    assert last["critic/explained_variance"] > 0.8
    assert wrong.mean() < 0.05


def test_the_value_is_of_the_state_before_the_token(tiny_model_dir: Path, tmp_path: Path) -> None:
    critic = make_critic(tiny_model_dir, tmp_path)
    micros, num_tokens = micro_batches(1, Ranks(30))
    critic.update(micros, [parity(m) for m in micros], critic.values(micros), num_tokens, 1)
    micro = micros[0]
    value = critic.values([micro])[0]
    changed = micro.tokens.clone()
    end = sum(micro.lengths[:1]) - 1
    changed[end] = (changed[end] + 1) % 200  # the last token of the first sample: no state before it changes
    other = MicroBatch(**{name: getattr(micro, name) for name in micro.__slots__} | {"tokens": changed})
    torch.testing.assert_close(critic.values([other])[0], value, rtol=0, atol=0)


def test_a_return_that_is_not_finite_leaves_the_critic_as_it_was(tiny_model_dir: Path, tmp_path: Path) -> None:
    critic = make_critic(tiny_model_dir, tmp_path)
    micros, num_tokens = micro_batches(1, Ranks(30))
    critic.update(micros, [parity(m) for m in micros], critic.values(micros), num_tokens, 1)
    before = critic.values(micros)
    returns = [parity(m) for m in micros]
    returns[-1][0] = float("nan")
    critic.update(micros, returns, before, num_tokens, 2)
    torch.testing.assert_close(critic.values(micros), before, rtol=0, atol=0)
    critic.update(micros, [parity(m) for m in micros], before, num_tokens, 3)
    assert not torch.equal(torch.cat(critic.values(micros)), torch.cat(before)), "and the next update counts again"


def test_micro_batches_add_up_to_one_update(tiny_model_dir: Path, tmp_path: Path) -> None:
    whole, parts = make_critic(tiny_model_dir, tmp_path), make_critic(tiny_model_dir, tmp_path)
    micros, num_tokens = micro_batches(1, Ranks(30))
    assert len(micros) > 1
    a = parts.update(micros, [parity(m) for m in micros], parts.values(micros), num_tokens, 1)
    one = micro_batches(1, Ranks(30), max_tokens=10_000)[0]
    assert len(one) == 1
    b = whole.update(one, [parity(m) for m in one], whole.values(one), num_tokens, 1)
    assert a["critic/grad_norm"] == pytest.approx(b["critic/grad_norm"], rel=1e-5)
    assert a["critic/vf_loss"] == pytest.approx(b["critic/vf_loss"], rel=1e-6)


def test_checkpoints_hold_policy_and_critic(tiny_model_dir: Path, tmp_path: Path) -> None:
    whole = run_case(Case("whole", str(tmp_path / "whole"), steps=3, sections=GAE), tiny_model_dir, tmp_path)
    first = run_case(Case("first", str(tmp_path / "parts"), steps=2, sections=GAE), tiny_model_dir, tmp_path)
    second = run_case(Case("second", str(tmp_path / "parts"), steps=1, sections=GAE), tiny_model_dir, tmp_path)
    assert [m["critic/vf_loss"] for m in first.critic + second.critic] == [m["critic/vf_loss"] for m in whole.critic]
    assert second.losses == whole.losses[2:]
