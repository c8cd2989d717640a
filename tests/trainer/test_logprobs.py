"""Log-probs from hidden states: equal to full logits in value and gradient, and never the size of them."""

import pytest
import torch
from torch import Tensor

from trainer.logprobs import LogprobHead


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (1.0, -0.3)], ids=["logprobs", "entropy", "both"])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_gradients_of_either_output_alone_and_of_both(weights: tuple[float, float], chunk: int) -> None:
    torch.manual_seed(1)
    layer = torch.nn.Linear(8, 30, dtype=torch.float64)
    hidden = torch.randn(17, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 30, (17,))
    per_token = torch.randn(17, dtype=torch.float64)
    log_p = torch.log_softmax(layer(hidden) / 0.6, -1)
    expected = (log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1))
    leaves = [hidden, *layer.parameters()]

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return (per_token * (weights[0] * logprobs + weights[1] * entropy)).sum()

    out = LogprobHead(layer, 0.6, chunk)(hidden, targets)
    torch.testing.assert_close((out.logprobs, out.entropy), expected)
    actual_grads = torch.autograd.grad(loss(*out), leaves)
    torch.testing.assert_close(actual_grads, torch.autograd.grad(loss(*expected), leaves))


def test_only_one_output_is_needed() -> None:
    layer = torch.nn.Linear(4, 9)
    hidden = torch.randn(3, 4, requires_grad=True)
    out = LogprobHead(layer, 1.0, 2)(hidden, torch.tensor([0, 1, 2]))
    out.entropy.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().sum() > 0


def test_logits_far_from_zero_stay_exact() -> None:
    layer = torch.nn.Linear(4, 9, bias=False)
    with torch.no_grad():
        layer.weight.mul_(1e4)
    hidden = torch.randn(6, 4)
    targets = torch.arange(6)
    out = LogprobHead(layer, 1.0, 4)(hidden, targets)
    expected = torch.log_softmax(layer(hidden).double(), -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(out.logprobs.double(), expected, rtol=1e-5, atol=1e-3)
    assert out.entropy.isfinite().all()
    assert (out.entropy >= -1e-5).all()


def test_half_precision_weights_get_a_gradient_summed_in_float32() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 40, bias=False, dtype=torch.bfloat16)
    hidden = torch.randn(512, 16, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 40, (512,))
    LogprobHead(layer, 1.0, 8)(hidden, targets).logprobs.sum().backward()
    wide = torch.nn.Linear(16, 40, bias=False)
    wide.load_state_dict({"weight": layer.weight.float()})
    torch.log_softmax(wide(hidden.detach().float()), -1).gather(1, targets[:, None]).sum().backward()
    assert layer.weight.grad is not None
    assert wide.weight.grad is not None
    error = (layer.weight.grad.float() - wide.weight.grad).norm() / wide.weight.grad.norm()
    assert error < 0.01, "64 chunks added up in bfloat16 would be off by more"


def test_full_logits_never_exist() -> None:
    vocabulary, tokens, chunk = 5000, 64, 4
    layer = torch.nn.Linear(8, vocabulary, bias=False)
    hidden = torch.randn(tokens, 8, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out = LogprobHead(layer, 1.0, chunk)(hidden, targets)
        (out.logprobs.sum() + out.entropy.sum()).backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    weights = layer.weight.numel() * 4
    assert largest <= 2 * weights < tokens * vocabulary * 4, "nothing larger than the gradient of the weights is made"
