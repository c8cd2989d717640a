"""Log-probs and entropy of tokens from hidden states, a chunk of logits at a time.

The logits of T tokens over V words would be the largest tensor of a training step. Here they exist for one chunk at a
time, in the forward pass and again in the backward pass, which recomputes them. What is kept is the hidden states and
two numbers a token.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class TokenLogprobs(NamedTuple):
    """`logprobs` [R] of the given tokens and `entropy` [R] of the distributions they were drawn from, float32 or
    wider."""

    logprobs: Tensor
    entropy: Tensor


class LogprobHead(nn.Module):
    """In place of a model's output layer: same parameters under the same names, log-probs instead of logits.

    It is a module, not a function, because ZeRO-3 gathers a module's parameters around its forward and backward pass.
    """

    def __init__(self, output_layer: nn.Module, temperature: float, chunk_tokens: int) -> None:
        super().__init__()
        self.weight = output_layer.weight
        self.bias = getattr(output_layer, "bias", None)
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens

    def forward(self, hidden: Tensor, targets: Tensor) -> TokenLogprobs:
        """`hidden` [R, H], `targets` [R] i64; logits are divided by the temperature, as the sampler's were."""
        outputs = _ChunkedLogprobs.apply(
            hidden, self.weight, self.bias, targets, 1 / self.temperature, self.chunk_tokens
        )
        return TokenLogprobs(*outputs)  # pyright: ignore[reportGeneralTypeIssues]  torch types apply() as one Tensor


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """[c, V] in float32 or wider."""
    logits = nn.functional.linear(hidden, weight, bias)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.log_softmax(logits.to(wide) * scale, dim=-1)


def _grad_logits(log_p: Tensor, targets: Tensor, entropy: Tensor, to_logprobs: Tensor, to_entropy: Tensor) -> Tensor:
    """[c, V] from `log_p` [c, V] and four [c]."""
    p = log_p.exp()
    finite = log_p.clamp(min=torch.finfo(log_p.dtype).min)
    grad = -p * (to_logprobs[:, None] + to_entropy[:, None] * (finite + entropy[:, None]))
    return grad.scatter_add_(1, targets[:, None], to_logprobs[:, None])


class _ChunkedLogprobs(torch.autograd.Function):
    """d logp_y/dz = onehot(y) - p and dH/dz = -p (log p + H), for logits z that were divided by the temperature."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(len(targets), dtype=wide)
        entropy = torch.empty_like(logprobs)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            log_p = _log_softmax(hidden[part], weight, bias, scale)  # [c, V]
            logprobs[part] = log_p.gather(1, targets[part, None])[:, 0]
            # Where p is 0 its logarithm may be -inf, and 0 · -inf must count as 0.
            entropy[part] = -(log_p.exp() * log_p.clamp(min=torch.finfo(wide).min)).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        ctx.scale, ctx.chunk = scale, chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Many chunks add up to one gradient: in the weights' own half precision that would lose the small ones.
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None else None
        for start in range(0, len(targets), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_p = _log_softmax(hidden[part], weight, bias, ctx.scale)
            grad = ctx.scale * _grad_logits(
                log_p, targets[part], entropy[part], grad_logprobs[part], grad_entropy[part]
            )
            grad_hidden[part] = grad.to(weight.dtype) @ weight
            if grad_weight is not None:
                grad_weight += grad.to(hidden.dtype).T @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return (
            grad_hidden,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(bias.dtype) if bias is not None and grad_bias is not None else None,
            None,
            None,
            None,
        )
