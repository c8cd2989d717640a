"""The values and gradients that verl gives for the same inputs: all of them, packed and in float64 and float32.

Tolerances: 1e-6 relative in float64 (and 1e-8 absolute: the file has ten digits). In float32 1e-4 relative, which is
what the rounding of 20 to 300 tokens leaves of seven digits; sums that cancel are held to 1e-6 absolute there.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.advantages import group_baseline, grpo, rloo, whiten
from trainer.aggregation import Counts, aggregate
from trainer.corrections import Corrector, Rejection
from trainer.gae import discounted_sums, gae, value_loss
from trainer.kl import KL_ESTIMATORS
from trainer.losses import POLICY_LOSSES, Clip, PolicyInputs
from trainer.metrics import token_metrics
from trainer.objective import MAX_NAMES, OWN_SUMS, SUM_NAMES
from trainer.off_policy import off_policy_sums
from trainer.spans import make_spans

CASES = json.loads((Path(__file__).parents[1] / "data" / "losses.json").read_text())["cases"]
PPO_CLIP = Clip(low=0.2, high=0.28, dual=3.0)
CLIPS = {"gspo": Clip(3e-4, 4e-4, 3.0), "cispo": Clip(1.0, 0.28, 3.0)}
CORRECTORS = {
    "token_tis_2": Corrector(cap=2.0),
    "token_icepop_0.5_2": Corrector(band=(0.5, 2.0)),
    "sequence_tis_2": Corrector(level="sequence", cap=2.0),
}
# verl writes k1 of the log-ratio the other way round: its bounds [lo, hi] are ours [1/hi, 1/lo].
REJECTIONS = {
    "token_k1/0.6_1.4": Rejection("k1", "token", "mean", 1 / 1.4, 1 / 0.6),
    "seq_mean_k1/0.9_1.1": Rejection("k1", "sequence", "mean", 1 / 1.1, 1 / 0.9),
    "seq_sum_k1/0.5_2.0": Rejection("k1", "sequence", "sum", 0.5, 2.0),
    "seq_max_k2/0.5": Rejection("k2", "sequence", "max", 0.0, 0.5),
    "seq_mean_k3/0.05": Rejection("k3", "sequence", "mean", 0.0, 0.05),
}

LAM = torch.tensor(0.95).item()  # verl's λ came as a float32 tensor; 1e-8 off 0.95, which is 1e-7 in what follows

pytestmark = pytest.mark.parametrize("case", CASES, ids=lambda c: f"seed{c['seed']}")


class Packed:
    """One case with its padding taken out: tokens [R] of samples laid end to end."""

    def __init__(self, case: Any, dtype: torch.dtype = torch.float64) -> None:
        self.case = case
        self.dtype = dtype
        self.mask = torch.tensor(case["inputs"]["response_mask"]).bool()  # [S, T]
        self.samples = self.mask.nonzero()[:, 0]  # [R]
        self.lengths: list[int] = self.mask.sum(1).tolist()
        self.versions = torch.zeros(len(self.samples), dtype=torch.int32)
        self.sequences = make_spans(self.samples, self.versions, "sequence")
        self.counts = Counts(len(self.samples), len(self.lengths), 32.0)

    def input(self, name: str) -> Tensor:
        """[R] of an input [S, T], or [S] as it is."""
        values = torch.tensor(self.case["inputs"][name], dtype=self.dtype)
        return values[self.mask] if values.dim() == 2 else values

    def expected(self, *names: str) -> Any:
        """A number, or [R] of what is [S, T]."""
        value = self.case["expected"]
        for name in names:
            value = value[name]
        return torch.tensor(value, dtype=self.dtype)[self.mask] if isinstance(value, list) else value

    @property
    def groups(self) -> Tensor:
        return torch.tensor(self.case["inputs"]["group_index"])

    def close(self, actual: Any, expected: Any) -> None:
        wide = self.dtype == torch.float64
        expected = torch.as_tensor(expected, dtype=self.dtype)
        actual = torch.as_tensor(actual, dtype=self.dtype)
        torch.testing.assert_close(actual, expected, rtol=1e-6 if wide else 1e-4, atol=1e-8 if wide else 1e-6)

    def token_rewards(self) -> Tensor:
        rewards = torch.zeros(len(self.samples), dtype=self.dtype)
        rewards[torch.tensor(self.lengths).cumsum(0) - 1] = self.input("rewards")
        return rewards


def every_name(*path: str) -> list[str]:
    value = CASES[0]["expected"]
    for name in path:
        value = value[name]
    return sorted(value)


def whitened(values: Tensor) -> Tensor:
    return whiten([values], lambda sums: sums)[0]


def test_nothing_of_the_file_is_left_out(case: Any) -> None:
    """Each group of values has a test below, which takes its names from the file."""
    compared = {"advantages", "gae_returns", "is_weights", "policy_loss", "kl", "value_loss", "rejection_mask"}
    assert set(case["expected"]) == compared | {"offpolicy_metrics"}
    assert set(case["expected"]["is_weights"]) == set(CORRECTORS)
    assert set(case["expected"]["rejection_mask"]) == set(REJECTIONS)


@pytest.mark.parametrize("name", every_name("advantages"))
def test_advantages(case: Any, name: str) -> None:
    p = Packed(case)
    rewards = p.input("rewards")
    if name == "gae_gamma1_lam095":
        result = gae(p.token_rewards(), p.input("values"), p.lengths, 1.0, LAM)
        p.close(result.returns, p.expected("gae_returns"))
        actual = whitened(result.advantages)
    elif name == "reinforce_plus_plus":
        actual = whitened(discounted_sums(p.token_rewards(), p.lengths, 1.0))
    elif name == "reinforce_plus_plus_baseline":
        actual = whitened(group_baseline(rewards, p.groups, False)[p.samples])
    elif name == "rloo":
        actual = rloo(rewards, p.groups, False)[p.samples]
    else:
        actual = grpo(rewards, p.groups, by_std=name == "grpo")[p.samples]
    p.close(actual, p.expected("advantages", name))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", every_name("policy_loss"))
def test_policy_loss_and_gradient(case: Any, name: str, dtype: torch.dtype) -> None:
    p = Packed(case, dtype)
    kind, *middle, mode = name.split("/")
    logprobs = p.input("logprobs").requires_grad_()
    proximal, behaviour = p.input("proximal_logprobs"), p.input("behaviour_logprobs")
    loss_name = kind if kind in CLIPS else "ppo_clip"
    old = behaviour if kind == "ppo_clip_behaviour" else proximal
    inputs = PolicyInputs(logprobs, old, p.expected("advantages", "grpo"))
    losses = POLICY_LOSSES[loss_name](inputs, CLIPS.get(kind, PPO_CLIP), p.sequences)
    values = losses.loss
    if kind == "decoupled":
        values = values * CORRECTORS[middle[0]].weigh(proximal, behaviour, p.samples, p.versions).weight
    loss = aggregate(mode, values, p.sequences, p.counts)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    expected = p.expected("policy_loss", name, "loss"), p.expected("policy_loss", name, "grad")
    p.close(loss.detach(), expected[0])
    p.close(gradient, expected[1])
    if dtype == torch.float64:
        p.close(losses.clipped.double().mean(), p.expected("policy_loss", name, "clipfrac"))
        p.close((old - logprobs.detach()).mean(), p.expected("policy_loss", name, "ppo_kl"))


@pytest.mark.parametrize("name", CORRECTORS)
def test_weights(case: Any, name: str) -> None:
    p = Packed(case)
    weights = CORRECTORS[name].weigh(p.input("proximal_logprobs"), p.input("behaviour_logprobs"), p.samples, p.versions)
    p.close(weights.weight, p.expected("is_weights", name))
    assert weights.keep.all()


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejection(case: Any, name: str) -> None:
    p = Packed(case)
    corrector = Corrector(rejection=REJECTIONS[name])
    weights = corrector.weigh(p.input("proximal_logprobs"), p.input("behaviour_logprobs"), p.samples, p.versions)
    assert torch.equal(weights.keep, p.expected("rejection_mask", name).bool())


@pytest.mark.parametrize("name", every_name("kl"))
def test_kl(case: Any, name: str) -> None:
    p = Packed(case)
    p.close(KL_ESTIMATORS[name](p.input("logprobs"), p.input("ref_logprobs")), p.expected("kl", name))


def test_value_loss(case: Any) -> None:
    p = Packed(case)
    losses = value_loss(p.input("value_predictions"), p.input("values"), p.expected("gae_returns"), 0.2)
    p.close(losses.loss.mean(), p.expected("value_loss", "loss"))
    p.close(losses.clipped.double().mean(), p.expected("value_loss", "clipfrac"))


def reported(p: Packed, parts: Sequence[Tensor]) -> dict[str, float]:
    """Metrics from sums over `parts`, each the indices of the tokens of whole samples."""
    sums = torch.zeros(len(SUM_NAMES), dtype=torch.float64)
    maxima = torch.full((len(MAX_NAMES),), -torch.inf, dtype=torch.float64)
    proximal, behaviour = p.input("proximal_logprobs"), p.input("behaviour_logprobs")
    for part in parts:
        samples, versions = p.samples[part], p.versions[part]
        weights = Corrector(cap=2.0).weigh(proximal[part], behaviour[part], samples, versions)
        spans = make_spans(samples, versions, "sequence")
        named, largest = off_policy_sums(proximal[part], behaviour[part], weights, versions, spans)
        own = dict.fromkeys(OWN_SUMS, torch.zeros(())) | {"tokens": torch.tensor(float(len(part)))}
        sums += torch.stack([(named | own)[name].double() for name in SUM_NAMES])
        maxima = torch.maximum(maxima, torch.stack([largest[name].double() for name in MAX_NAMES]))
    return token_metrics(sums, maxima)


def test_off_policy_metrics(case: Any) -> None:
    p = Packed(case)
    names = {"kl": "kl_behaviour_proximal_k1", "k3_kl": "kl_behaviour_proximal", "chi2_seq": "chi2_sequence"}
    whole = reported(p, [torch.arange(len(p.samples))])
    halves = reported(p, [(p.samples % 2 == 0).nonzero()[:, 0], (p.samples % 2 == 1).nonzero()[:, 0]])
    for name in case["expected"]["offpolicy_metrics"]:
        ours = f"off_policy/{names.get(name, name)}"
        p.close(whole[ours], p.expected("offpolicy_metrics", name))
        p.close(halves[ours], p.expected("offpolicy_metrics", name))
