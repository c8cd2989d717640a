"""DeepSpeed around a module: exact accumulation, update, save and load; and around the policy, its weights to publish.

Always true: a backward pass adds the gradient of its loss, whatever the number of micro-batches (DeepSpeed's own
accumulation count is 1 and the caller owns the boundary); losses are shares of a mean over all ranks, so DeepSpeed's
average over ranks is undone; an update with a gradient that is not finite changes neither weights nor moments; what
the settings say of the optimizer holds, also after a load that brought the moments of other settings.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protocol.settings import RunSettings
from protocol.settings.trainer import OptimSettings
from trainer.adapters import ADAPTER_FOLDER, adapter_layers, merged_weight, published_name, save_adapter
from trainer.deepspeed_config import clips_itself, deepspeed_config, start_deepspeed
from trainer.distributed import Ranks
from trainer.logprobs import TokenLogprobs
from trainer.model import LM_PREFIX, PolicyModel
from trainer.optimizer import FiniteWatch, SkippableAdamW
from trainer.packing import MicroBatch
from trainer.schedules import learning_rate
from trainer.universal import CLIENT_STATE, load_state

__all__ = ["ModuleEngine", "PolicyEngine", "start_deepspeed"]


class ModuleEngine:
    """A module that is trained, on this rank. `tag` names its state in a checkpoint."""

    def __init__(
        self, settings: RunSettings, module: nn.Module, optim: OptimSettings, grad_clip: float, tag: str, ranks: Ranks
    ) -> None:
        import deepspeed

        self.tag = tag
        self.total_steps = settings.trainer.total_training_steps or 1
        self.zero_stage = settings.deepspeed.zero_stage
        self._optim = optim
        self._ranks = ranks
        trained = [p for p in module.parameters() if p.requires_grad]
        self._all_trained = len(trained) == len(list(module.parameters()))
        self._optimizer = SkippableAdamW(trained, optim, grad_clip if clips_itself(settings) else None)
        self._watch = FiniteWatch(module)
        self._engine: Any = deepspeed.initialize(
            model=module, optimizer=self._optimizer, config=deepspeed_config(settings, grad_clip)
        )[0]

    @property
    def module(self) -> Any:
        """The module inside."""
        return self._engine.module

    def learning_rate(self, step: int) -> float:
        """Of training step `step`, out of `total_steps`, which the loop sets once it knows them."""
        return learning_rate(self._optim, step, self.total_steps)

    def backward(self, loss: Tensor) -> bool:
        """Add the gradient of `loss`, a share of the mean over all ranks; says whether it was finite."""
        self._engine.backward(loss * self._ranks.size)
        return self._watch.take()

    def update(self, lr: float, skip: bool) -> float:
        """Apply what was added up and forget it; returns the gradient's norm before clipping. Equal on every rank."""
        for group in self._engine.optimizer.param_groups:
            group["lr"], group["betas"], group["weight_decay"] = lr, self._optim.betas, self._optim.weight_decay
        self._optimizer.skip_update = skip
        self._engine.step()
        norm = self._optimizer.grad_norm if self._optimizer.max_norm else self._engine.get_global_grad_norm()
        return float("nan") if skip or norm is None else float(norm)

    def train(self, mode: bool) -> None:
        """Switch dropout and the like on or off."""
        self._engine.train(mode)

    def save(self, folder: Path) -> None:
        """Write what is trained and the optimizer's state into `folder`; every rank calls it."""
        self._engine.save_checkpoint(
            str(folder),
            tag=self.tag,
            save_latest=False,
            client_state=CLIENT_STATE,
            exclude_frozen_parameters=not self._all_trained,
        )

    def load(self, folder: Path, same_ranks: bool) -> None:
        """Read what `save` wrote, with as many ranks (`same_ranks`) or another number; every rank calls it."""
        load_state(self._engine, folder, self.tag, self._ranks, same_ranks, strict=self._all_trained)


class PolicyEngine(ModuleEngine):
    """The policy that is trained, on this rank."""

    def __init__(self, settings: RunSettings, policy: PolicyModel, ranks: Ranks, device: torch.device) -> None:
        super().__init__(settings, policy, settings.actor.optim, settings.actor.grad_clip, "policy", ranks)
        self.device = device
        self._lora = settings.model if settings.model.lora_rank else None

    @property
    def policy(self) -> PolicyModel:
        """The module inside."""
        return self.module

    def forward(self, micro: MicroBatch) -> TokenLogprobs:
        """Log-probs and entropy of the response tokens, with gradient."""
        return self._engine(micro)

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch) -> Tensor:
        """Log-probs [R] of the response tokens, without gradient."""
        return self._engine(micro).logprobs

    def save(self, folder: Path) -> None:
        """As every module's; adapters also in peft's own format, for other tools."""
        super().save(folder)
        if self._lora is not None:
            save_adapter(self.policy.lm, self._lora, folder / ADAPTER_FOLDER, self.zero_stage == 3, self._ranks.is_main)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole weights, one at a time, tied ones once; every rank must run it to the end.

        Under ZeRO-3 each is gathered when its turn comes and let go afterwards. An adapter is added to its weight.
        """
        import deepspeed

        adapters = adapter_layers(self.policy.lm)
        for name, parameter in self._published():
            layer = adapters.get(name)
            gathered = [parameter, *(layer.parameters() if layer is not None else [])]
            with deepspeed.zero.GatheredParameters(gathered, enabled=self.zero_stage == 3):
                weight = parameter if layer is None else merged_weight(layer)
                yield published_name(name), weight.detach()

    def weight_shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and whole shape by Hugging Face name, in the order of `named_weights`."""
        return {
            published_name(name): (p.dtype, tuple(getattr(p, "ds_shape", p.shape))) for name, p in self._published()
        }

    def _published(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of the Hugging Face model, by their names in it; adapters are not among them."""
        for name, parameter in self.policy.named_parameters():
            inner = name.removeprefix(LM_PREFIX)
            if published_name(inner):
                yield inner, parameter
