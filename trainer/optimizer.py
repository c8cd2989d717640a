"""AdamW that can be told to leave the weights alone.

DeepSpeed reduces gradients and steps in one call. When a gradient was not finite the call must still be made, on every
rank, so that DeepSpeed's books and gradients are reset, but neither weights nor moments may change.
"""

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor

from protocol.settings.trainer import OptimSettings


class SkippableAdamW(torch.optim.AdamW):
    """`skip_update`: the next calls of `step` do nothing. `max_norm`: clip here, where nobody else does.

    `grad_norm` is the norm before clipping, if it clips here, else None.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], optim: OptimSettings, max_norm: float | None) -> None:
        super().__init__(params, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay)
        self.skip_update = False
        self.max_norm = max_norm
        self.grad_norm: float | None = None

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Any = None) -> Any:
        """One update, unless it is to be skipped."""
        if self.skip_update:
            return None
        if self.max_norm is not None:
            params = [p for group in self.param_groups for p in group["params"]]
            self.grad_norm = float(torch.nn.utils.clip_grad_norm_(params, self.max_norm))
        return super().step(closure)


class FiniteWatch:
    """Notices gradients that are not finite as they are computed, before DeepSpeed partitions or sums them."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._found: Tensor | None = None
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._look)

    def take(self) -> bool:
        """Whether all gradients since the last call were finite."""
        found, self._found = self._found, None
        return found is None or bool(found.isfinite())

    def _look(self, grad: Tensor) -> None:
        # Zero times anything finite is zero; the sum stays on the device, so that nothing waits for it here.
        probe = (grad.float() * 0).sum()
        self._found = probe if self._found is None else self._found + probe
