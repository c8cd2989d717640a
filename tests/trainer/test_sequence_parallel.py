"""A pack in parts: what each rank gets, and what is refused. What it computes is in test_zero.py, on real ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from transformers import AutoConfig, Qwen3ForCausalLM

from protocol.errors import SettingsError
from tests.trainer.factory import make_batch, make_settings
from trainer.packing import micro_batch_bounds, pack
from trainer.sequence_parallel import SequenceGroup, check_sequence_parallel, share_sequences

UNTIMED = hypothesis_settings(deadline=None)  # the machine may be busy


def place(rank: int, size: int) -> SequenceGroup:
    no_processes: Any = None
    return SequenceGroup(rank, size, no_processes)


@UNTIMED
@given(st.lists(st.integers(0, 15), max_size=6, unique=True), st.integers(1, 9))
def test_parts_are_the_pack(samples: list[int], size: int) -> None:
    micro = pack(make_batch(), samples)
    parts = [place(rank, size).part(micro) for rank in range(size)]
    assert len({len(part.tokens) for part in parts}) == 1, "equal runs, else the exchange hangs"
    tokens, positions = (torch.cat([getattr(p, name) for p in parts]) for name in ("tokens", "positions"))
    num_tokens = len(micro.tokens)
    assert torch.equal(tokens[:num_tokens], micro.tokens)
    assert torch.equal(positions[:num_tokens], micro.positions)
    assert positions[num_tokens:].tolist() == list(range(len(tokens) - num_tokens)), (
        "the filling is a sample of its own"
    )
    assert all(sum(part.lengths) == len(tokens) for part in parts)
    assert torch.equal(torch.cat([part.targets for part in parts]), micro.targets)
    start = [rank * len(parts[0].tokens) for rank in range(size)]
    predictors = torch.cat([part.predictors + begin for part, begin in zip(parts, start, strict=True)])
    assert torch.equal(predictors, micro.predictors)
    assert all(((part.predictors >= 0) & (part.predictors < len(part.tokens))).all() for part in parts)
    assert all(torch.equal(part.samples, micro.samples) for part in parts), "the loss is over the whole"


def test_ranks_of_a_group_have_room_for_their_tokens_together(tmp_path: Path) -> None:
    actor = {"ulysses_sequence_parallel_size": 4, "ppo_max_token_len_per_gpu": 100}
    assert micro_batch_bounds(make_settings(tmp_path, tmp_path, actor=actor).actor).max_tokens == 400


@pytest.mark.parametrize(
    ("sections", "gpus", "ranks", "message"),
    [
        ({}, False, "2", r"needs 2 GPUs and there is none here: set it to 1, and bound memory with"),
        ({}, True, "3", r"does not divide the number of ranks, which is 3"),
        ({"model": {"use_remove_padding": False}}, True, "2", r"set model.use_remove_padding = true"),
    ],
)
def test_refused_before_anything_is_loaded(
    sections: dict[str, Any], gpus: bool, ranks: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setenv("WORLD_SIZE", ranks)
    settings = make_settings(tmp_path, tmp_path, actor={"ulysses_sequence_parallel_size": 2}, **sections)
    with pytest.raises(SettingsError, match=message):
        check_sequence_parallel(settings)


def test_taken_where_ranks_and_gpus_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_sequence_parallel(make_settings(tmp_path, tmp_path, actor={"ulysses_sequence_parallel_size": 2}))


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (3, {}, r"does not divide the model's 4 attention heads and 2 key-value heads"),
        (2, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, r"dynamic ones"),
    ],
)
def test_models_that_can_not_be_shared_are_refused(
    tiny_model_dir: Path, size: int, changes: dict[str, Any], message: str
) -> None:
    config = AutoConfig.from_pretrained(tiny_model_dir)
    config.update(changes)
    with pytest.raises(SettingsError, match=message):
        share_sequences(Qwen3ForCausalLM(config), place(0, size))
