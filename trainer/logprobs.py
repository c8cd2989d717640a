"""Log-probs and entropy of tokens from hidden states, a chunk of logits at a time.

Always true: the logits of T tokens over V words, which would be the largest tensor of a training step, exist for one
chunk at a time only, in the forward pass and again in the backward pass, which recomputes them; at most two buffers of
a chunk's logits are alive at once, because everything on them is done in place; what is kept is the hidden states and
a few numbers a token.
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


def _scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """[c, V] in float32 or wider, finite: a word that can't be drawn has the smallest number, so that 0 · z is 0."""
    logits = nn.functional.linear(hidden, weight, bias)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if scale != 1:
        wide.mul_(scale)
    return wide.clamp_(min=torch.finfo(wide.dtype).min) if bias is not None else wide


def _normalisers(logits: Tensor) -> tuple[Tensor, Tensor]:
    """log Σ exp z [c] and the entropy [c] of logits z [c, V], which are overwritten."""
    largest = logits.amax(-1, keepdim=True)
    shifted = logits.sub_(largest)
    p = shifted.exp()
    total = p.sum(-1)
    # H = log Σ e^z − Σ z e^z / Σ e^z, for z shifted by the largest.
    entropy = total.log() - p.mul_(shifted.clamp_(min=torch.finfo(p.dtype).min)).sum(-1) / total
    return total.log() + largest[:, 0], entropy


def _grad_logits(
    logits: Tensor, log_total: Tensor, entropy: Tensor, to_logprobs: Tensor | None, to_entropy: Tensor | None
) -> Tensor:
    """The part of the gradient [c, V] that is spread over all words; `logits` are overwritten."""
    log_p = logits.sub_(log_total[:, None])
    if to_entropy is None:
        return log_p.exp_().mul_(-to_logprobs[:, None]) if to_logprobs is not None else log_p.zero_()
    p = log_p.exp()
    # −p (g_logprobs + g_entropy (log p + H)), in place.
    factor = log_p.clamp_(min=torch.finfo(p.dtype).min).add_(entropy[:, None]).mul_(to_entropy[:, None])
    if to_logprobs is not None:
        factor.add_(to_logprobs[:, None])
    return factor.mul_(p).neg_()


class _ChunkedLogprobs(torch.autograd.Function):
    """d logp_y/dz = onehot(y) - p and dH/dz = -p (log p + H), for logits z that were divided by the temperature."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(len(targets), dtype=wide)
        entropy, log_total = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logits = _scaled_logits(hidden[part], weight, bias, scale)  # [c, V]
            of_target = logits.gather(1, targets[part, None])[:, 0]
            log_total[part], entropy[part] = _normalisers(logits)
            logprobs[part] = of_target - log_total[part]
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, log_total)
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.chunk = scale, chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        to_logprobs, to_entropy = grads
        hidden, weight, bias, targets, entropy, log_total = ctx.saved_tensors
        if to_entropy is not None and not to_entropy.any():
            to_entropy = None  # no entropy bonus: half of the work on each chunk is saved
        grad_hidden = torch.empty_like(hidden)
        # Many chunks add up to one gradient: in the weights' own half precision that would lose the small ones.
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None else None
        for start in range(0, len(targets), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = _scaled_logits(hidden[part], weight, bias, ctx.scale)
            g_logprobs, g_entropy = (None if g is None else g[part] for g in (to_logprobs, to_entropy))
            grad = _grad_logits(logits, log_total[part], entropy[part], g_logprobs, g_entropy)
            if g_logprobs is not None:
                grad.scatter_add_(1, targets[part, None], g_logprobs[:, None])
            if ctx.scale != 1:
                grad.mul_(ctx.scale)
            narrow = grad.to(weight.dtype)
            grad_hidden[part] = narrow @ weight
            if grad_weight is not None:
                _add_product(grad_weight, narrow, hidden[part])
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


def _add_product(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """total [V, H] += grad.T @ hidden, without a second [V, H] where the dtypes are one."""
    if total.dtype == hidden.dtype:
        total.addmm_(grad.T, hidden)
    else:
        total += grad.T @ hidden
