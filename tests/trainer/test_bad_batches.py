"""Batches of another model are refused; a gradient that is not finite leaves DeepSpeed's weights and moments alone."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protocol.errors import DataError
from protocol.settings.algorithm import Correction
from tests.trainer.factory import VOCABULARY, make_batch, make_settings
from trainer.batch_checks import check_batch
from trainer.deepspeed_config import start_deepspeed
from trainer.distributed import Ranks
from trainer.engine import PolicyEngine
from trainer.model import load_policy
from trainer.update import Updater

pytestmark = pytest.mark.filterwarnings("ignore:.torch.*is deprecated")


class Model:
    """What a policy can take."""

    def __init__(self, vocabulary_size: int = VOCABULARY, context_length: int | None = None) -> None:
        self.vocabulary_size = vocabulary_size
        self.context_length = context_length


def test_a_sample_that_does_not_fit_into_the_context_is_refused() -> None:
    batch = make_batch()
    longest = int(np.diff(batch.sample_offsets).max())
    check_batch(batch, Model(context_length=longest), Correction.DECOUPLED)
    with pytest.raises(
        DataError, match=rf"{longest} tokens and the model's context is {longest - 1}: lower data\.max_"
    ):
        check_batch(batch, Model(context_length=longest - 1), Correction.DECOUPLED)


@pytest.mark.parametrize("token", [VOCABULARY, -1])
def test_tokens_that_the_model_does_not_know_are_refused(token: int) -> None:
    batch = make_batch()
    tokens = batch.tokens.copy()
    tokens[7] = token
    with pytest.raises(DataError, match=rf"the model knows {VOCABULARY}: the service runs another model"):
        check_batch(replace(batch, tokens=tokens), Model(), Correction.DECOUPLED)


@pytest.mark.parametrize("correction", [Correction.BEHAVIOUR, Correction.DECOUPLED])
def test_logprobs_that_are_all_missing_are_refused_and_a_broken_one_is_not(correction: Correction) -> None:
    batch = make_batch()
    nothing = replace(batch, logprobs=np.full_like(batch.logprobs, np.nan))
    with pytest.raises(DataError, match=rf"algorithm\.correction = '{correction}' needs them"):
        check_batch(nothing, Model(), correction)
    check_batch(nothing, Model(), Correction.NONE)
    one = batch.logprobs.copy()
    one[int(batch.sample_offsets[1]) - 1] = np.nan
    check_batch(replace(batch, logprobs=one), Model(), correction)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_gradient_that_is_not_finite_changes_neither_weights_nor_moments(
    tiny_model_dir: Path, tmp_path: Path, zero_stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    settings = make_settings(tiny_model_dir, tmp_path, deepspeed={"zero_stage": zero_stage})
    device, ranks = start_deepspeed(), Ranks(30)
    engine = PolicyEngine(settings, load_policy(settings, tiny_model_dir, device), ranks, device)
    updater = Updater(settings, engine, None, ranks)

    def weights() -> dict[str, torch.Tensor]:
        return {name: weight.clone() for name, weight in engine.named_weights()}

    def run(step: int) -> int:
        return updater.run(make_batch(step=step), step, 0).num_updates

    assert run(1) == 1
    before = weights()
    layer: Any = engine.policy.lm.get_decoder().layers[0]

    def overflow(_: Any, grads: tuple[torch.Tensor | None, ...]) -> Any:
        return tuple(None if g is None else g * torch.inf for g in grads)

    hook = layer.register_full_backward_pre_hook(overflow)  # the loss itself stays finite
    with caplog.at_level(logging.ERROR, "april.trainer"):
        assert run(2) == 0
    hook.remove()
    assert "step 2: loss or gradient is not finite for sample s2-g0/" in caplog.text
    assert all(torch.equal(before[name], weight) for name, weight in weights().items())

    assert run(3) == 1
    moved = weights()
    control = PolicyEngine(settings, load_policy(settings, tiny_model_dir, device), ranks, device)
    untroubled = Updater(settings, control, None, ranks)
    for step in (1, 3):
        untroubled.run(make_batch(step=step), step, 0)
    expected = {name: weight.clone() for name, weight in control.named_weights()}
    assert all(torch.equal(expected[name], weight) for name, weight in moved.items()), "as if step 2 had never been"
