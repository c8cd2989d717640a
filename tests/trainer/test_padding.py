"""The padded form gives what the packed form gives, and settings that choose between them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from protocol.errors import SettingsError
from protocol.settings.trainer import ModelSettings
from tests.trainer.factory import make_batch, make_settings
from trainer.kernels import check_kernels
from trainer.model import PolicyModel, load_policy
from trainer.packing import Bounds, micro_batch_bounds, pack, plan_ranks

CPU = torch.device("cpu")


@pytest.fixture
def policies(tiny_model_dir: Path, tmp_path: Path) -> tuple[PolicyModel, PolicyModel]:
    """Packed and padded."""
    made = [
        load_policy(
            make_settings(tiny_model_dir, tmp_path, model={"path": tiny_model_dir, "use_remove_padding": packed}),
            tiny_model_dir,
            CPU,
        ).double()
        for packed in (True, False)
    ]
    return made[0], made[1]


@pytest.mark.parametrize("indices", [[3], [0, 7, 12, 5], []])
def test_padded_and_packed_are_one_loss_and_one_gradient(policies, indices: list[int]) -> None:
    micro = pack(make_batch(), indices)
    weights = torch.linspace(-1, 1, len(micro.targets), dtype=torch.float64)
    results = []
    for policy in policies:
        out = policy(micro)
        loss = (weights * out.logprobs + 0.1 * out.entropy).sum()
        loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in policy.named_parameters()}))
    (loss, grads), (padded_loss, padded_grads) = results
    torch.testing.assert_close(padded_loss, loss, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(padded_grads, grads, rtol=1e-6, atol=1e-9)


def test_the_padded_form_really_pads(policies) -> None:
    seen: list[torch.Size] = []
    policies[1].lm.get_decoder().register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    micro = pack(make_batch(), [0, 7, 12])
    policies[1](micro)
    assert seen == [torch.Size([3, max(micro.lengths)])]


def test_padded_micro_batches_hold_like_lengths_and_count_padding() -> None:
    lengths = [100, 10, 98, 11, 9, 97]
    plan = plan_ranks(lengths, Bounds(300, padded=True), 1)
    bins = [sorted(lengths[i] for i in b) for b in plan[0] if b]
    assert sorted(bins) == [[9, 10, 11], [97, 98, 100]]
    assert len(plan_ranks(lengths, Bounds(325), 1)[0]) == 1, "packed, all of them fit into one"


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_fixed_number_of_samples(tmp_path: Path, num_ranks: int) -> None:
    actor = make_settings(tmp_path, tmp_path, actor={"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 4}).actor
    lengths = np.random.default_rng(0).lognormal(4, 1, 22).astype(int).clip(1).tolist()
    plan = plan_ranks(lengths, micro_batch_bounds(actor), num_ranks)
    sizes = [len(b) for rank in plan for b in rank]
    assert max(sizes) <= 4
    assert sum(sizes) == 22
    assert len(plan[0]) == -(-22 // (4 * num_ranks)), "as few micro-batches as the number allows"
    loads = [sum(lengths[i] for b in rank for i in b) for rank in plan]
    assert max(loads) - min(loads) <= max(lengths)


def test_a_fixed_number_must_be_given(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs actor.ppo_micro_batch_size_per_gpu: set it"):
        make_settings(tmp_path, tmp_path, actor={"use_dynamic_bsz": False})


def test_liger_is_refused_where_it_cannot_run(monkeypatch) -> None:
    check_kernels(ModelSettings(), "cpu")
    with pytest.raises(SettingsError, match="needs a CUDA GPU and the trainer runs on cpu"):
        check_kernels(ModelSettings(use_liger=True), "cpu")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(SettingsError, match="needs the package liger-kernel"):
        check_kernels(ModelSettings(use_liger=True), "cuda")
