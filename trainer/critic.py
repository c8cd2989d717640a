"""The critic of PPO: values of states, and one optimizer step towards the returns.

Always true: it has a DeepSpeed engine, an optimizer and a schedule of its own, on the ranks and in the ZeRO stage of
the policy; all ranks make the same number of passes; an update with a loss or gradient that is not finite is left out
on every rank together.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from protocol.errors import SettingsError
from protocol.settings import RunSettings
from trainer.distributed import Ranks
from trainer.engine import ModuleEngine
from trainer.gae import value_loss
from trainer.packing import MicroBatch
from trainer.value_model import load_value_model

SUM_NAMES = ("tokens", "loss", "clipped", "values", "returns", "squared_returns", "errors", "squared_errors")


class CriticEngine(ModuleEngine):
    """The value network that is trained, on this rank."""

    def forward(self, micro: MicroBatch) -> Tensor:
        """Values [R] f32, with gradient."""
        return self._engine(micro)


class Critic:
    """Every rank calls it with its own micro-batches, equally many on each."""

    def __init__(self, settings: RunSettings, ranks: Ranks, device: torch.device) -> None:
        path = settings.critic.model.path or settings.model.path
        if path is None:
            raise SettingsError("the critic needs a network: set critic.model.path or model.path")
        chosen = settings.critic
        network = load_value_model(settings, Path(path), device, ranks.sequence)
        self.engine = CriticEngine(settings, network, chosen.optim, chosen.grad_clip, "critic", ranks)
        self._cliprange = chosen.cliprange_value
        self._ranks = ranks

    @torch.no_grad()
    def values(self, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """Values [R] f32 of the state before each response token of each micro-batch."""
        self.engine.train(False)
        return [self.engine.forward(micro) for micro in micros]

    def update(
        self,
        micros: Sequence[MicroBatch],
        returns: Sequence[Tensor],
        old_values: Sequence[Tensor],
        num_tokens: int,
        step: int,
    ) -> dict[str, float]:
        """One optimizer step of training step `step`; `num_tokens` and the metrics are over all ranks."""
        self.engine.train(True)
        sums = torch.zeros(len(SUM_NAMES), dtype=torch.float64)
        finite = True
        for micro, target, old in zip(micros, returns, old_values, strict=True):
            values = self.engine.forward(micro)
            losses, clipped = value_loss(values, old, target, self._cliprange)
            finite &= self.engine.backward(losses.sum() / num_tokens) and bool(losses.isfinite().all())
            sums += _sums(values.detach(), target, losses.detach(), clipped)
        lr = self.engine.learning_rate(step)
        norm = self.engine.update(lr, skip=self._ranks.any_of(not finite))
        return _metrics(self._ranks.total(sums)) | {"critic/lr": lr, "critic/grad_norm": norm}


def _sums(values: Tensor, returns: Tensor, losses: Tensor, clipped: Tensor) -> Tensor:
    errors = (returns - values).double()
    columns = {
        "tokens": torch.ones_like(errors),
        "loss": losses,
        "clipped": clipped,
        "values": values,
        "returns": returns,
        "squared_returns": returns.double().square(),
        "errors": errors,
        "squared_errors": errors.square(),
    }
    return torch.stack([columns[name].double().sum() for name in SUM_NAMES]).cpu()


def _metrics(sums: Tensor) -> dict[str, float]:
    """Means over tokens; `explained_variance` is 1 where the values say all that can be known of the returns."""
    total = dict(zip(SUM_NAMES, sums.tolist(), strict=True))
    tokens = max(1.0, total["tokens"])
    mean = {name: value / tokens for name, value in total.items()}
    variance = mean["squared_returns"] - mean["returns"] ** 2
    residual = mean["squared_errors"] - mean["errors"] ** 2
    return {
        "critic/vf_loss": mean["loss"],
        "critic/vf_clipfrac": mean["clipped"],
        "critic/vpred_mean": mean["values"],
        "critic/returns_mean": mean["returns"],
        "critic/explained_variance": 1 - residual / variance if variance > 0 else math.nan,
    }
