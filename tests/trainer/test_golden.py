"""The values and gradients that verl gives for the same inputs, in float64."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.settings.trainer import Correction
from trainer.advantages import grpo
from trainer.corrections import token_tis
from trainer.kl import low_var_kl
from trainer.losses import POLICY_LOSSES, Clip, PolicyInputs, TokenLosses, ppo_clip, token_mean

CASES = json.loads((Path(__file__).parents[1] / "data" / "losses.json").read_text())["cases"]
CLIP = Clip(low=0.2, high=0.28, dual=3.0)
NAMES = {
    "ppo_clip/token-mean": Correction.NONE,
    "ppo_clip_behaviour/token-mean": Correction.BEHAVIOUR,
    "decoupled/token_tis_2/token-mean": Correction.DECOUPLED,
}

pytestmark = pytest.mark.parametrize("case", CASES, ids=lambda c: f"seed{c['seed']}")


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(actual: torch.Tensor, expected: Any) -> None:
    torch.testing.assert_close(actual, tensor(expected), rtol=1e-6, atol=1e-8)


def inputs_of(case: Any, estimator: str = "grpo") -> tuple[PolicyInputs, torch.Tensor]:
    given = case["inputs"]
    inputs = PolicyInputs(
        logprobs=tensor(given["logprobs"]).requires_grad_(),
        proximal=tensor(given["proximal_logprobs"]),
        behaviour=tensor(given["behaviour_logprobs"]),
        advantages=tensor(case["expected"]["advantages"][estimator]),
    )
    return inputs, tensor(given["response_mask"]).bool()


@pytest.mark.parametrize(("name", "by_std"), [("grpo", True), ("grpo_no_std", False)])
def test_advantages(case: Any, name: str, by_std: bool) -> None:
    given = case["inputs"]
    advantages = grpo(tensor(given["rewards"]), torch.tensor(given["group_index"]), by_std)
    close(advantages[:, None] * tensor(given["response_mask"]), case["expected"]["advantages"][name])


@pytest.mark.parametrize("name", NAMES)
def test_policy_loss_and_gradient(case: Any, name: str) -> None:
    inputs, mask = inputs_of(case)
    expected = case["expected"]["policy_loss"][name]
    losses = POLICY_LOSSES[NAMES[name]](inputs, CLIP, 2.0)
    loss = token_mean(losses.loss[mask], int(mask.sum()))
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    close(loss.detach(), expected["loss"])
    close(gradient, expected["grad"])
    close(losses.clipped[mask].double().mean(), expected["clipfrac"])


def test_packed_tokens_give_the_same_loss_as_padded_rows(case: Any) -> None:
    inputs, mask = inputs_of(case)
    packed = PolicyInputs(*(t[mask] for t in inputs))
    whole: TokenLosses = POLICY_LOSSES[Correction.DECOUPLED](packed, CLIP, 2.0)
    expected = case["expected"]["policy_loss"]["decoupled/token_tis_2/token-mean"]
    close(token_mean(whole.loss, int(mask.sum())).detach(), expected["loss"])


def test_weights(case: Any) -> None:
    inputs, mask = inputs_of(case)
    weights = token_tis(inputs.proximal, inputs.behaviour, 2.0)
    close(weights * mask, case["expected"]["is_weights"]["token_tis_2"])


def test_low_var_kl(case: Any) -> None:
    inputs, mask = inputs_of(case)
    estimate = low_var_kl(inputs.logprobs.detach(), tensor(case["inputs"]["ref_logprobs"]))
    close(estimate * mask, case["expected"]["kl"]["low_var_kl"])


def test_mean_log_ratio(case: Any) -> None:
    inputs, mask = inputs_of(case)
    drift = (inputs.proximal - inputs.logprobs.detach())[mask].mean()
    close(drift, case["expected"]["policy_loss"]["ppo_clip/token-mean"]["ppo_kl"])
    assert ppo_clip(inputs.logprobs, inputs.logprobs, inputs.advantages, CLIP).clipped.sum() == 0
