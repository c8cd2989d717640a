"""Muon for the matrices of a small model, AdamW for everything else.

Muon: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. For a matrix W with gradient
G, with momentum μ and learning rate η:

    B ← μ·B + G,   M = G + μ·B (Nesterov),   O = NS5(M / ‖M‖_F),   W ← W − η·sqrt(max(1, rows / cols))·O

NS5 is five steps of the quintic Newton–Schulz iteration X ← a·X + (b·A + c·A²)·X with A = X·Xᵀ, which moves every
singular value of X near 1: an update of the same size in all directions. AdamW alone did not teach this demo's model
to copy within the time there is.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # the source's a, b, c: steepest at zero, singular values end in 0.7–1.2
NEWTON_SCHULZ_STEPS = 5
NORM_FLOOR = 1e-7  # a matrix without a gradient stays where it is


def orthogonalize(matrices: Tensor) -> Tensor:
    """NS5 of each matrix in `matrices` [K, rows, cols]: U·Vᵀ of its singular value decomposition, approximately."""
    a, b, c = NEWTON_SCHULZ
    wide = matrices.size(-2) <= matrices.size(-1)
    x = matrices if wide else matrices.mT  # the smaller side makes the smaller product
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(NORM_FLOOR)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """Muon over 2-D parameters; those of one shape are orthogonalized together."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float) -> None:
        """`lr` is the spectral size of one update of a wide matrix."""
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  no closure is evaluated
        """One update from the gradients there are."""
        assert closure is None, "Muon evaluates no closure"
        for group in self.param_groups:
            for weights in _by_shape(group["params"]):
                self._update(weights, group["lr"], group["momentum"])

    def _update(self, weights: list[nn.Parameter], lr: float, momentum: float) -> None:
        directions: list[Tensor] = []
        for weight in weights:
            assert weight.grad is not None, "every matrix takes part in the loss"
            state: dict[str, Any] = self.state[weight]
            buffer = state.setdefault("momentum", torch.zeros_like(weight))
            buffer.mul_(momentum).add_(weight.grad)
            directions.append(weight.grad + momentum * buffer)
        rows, cols = weights[0].shape
        scale = lr * max(1.0, rows / cols) ** 0.5
        for weight, update in zip(weights, orthogonalize(torch.stack(directions)), strict=True):
            weight.sub_(update, alpha=scale)


def make_optimizers(
    model: nn.Module, matrix_lr: float, matrix_momentum: float, other_lr: float
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between embedding and head; AdamW, without weight decay, for the rest."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name and "head" not in name]
    taken = {id(p) for p in matrices}
    others = [p for _, p in named if id(p) not in taken]
    return [
        Muon(matrices, matrix_lr, matrix_momentum),
        torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def _by_shape(weights: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
    for weight in weights:
        groups[weight.shape].append(weight)
    return list(groups.values())
