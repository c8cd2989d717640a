"""DeepSpeed around the policy: forward, exact accumulation, update, save, load, and weights for publishing.

Always true: a backward pass adds the gradient of its loss, whatever the number of micro-batches (DeepSpeed's own
accumulation count is 1 and the caller owns the boundary); losses are shares of a mean over all ranks, so DeepSpeed's
average over ranks is undone; an update with a gradient that is not finite changes neither weights nor moments.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protocol.errors import TrainingError
from protocol.settings import RunSettings
from trainer.distributed import Ranks, prepare_environment
from trainer.logprobs import TokenLogprobs
from trainer.model import LM_PREFIX, PolicyModel
from trainer.optimizer import FiniteWatch, SkippableAdamW
from trainer.packing import MicroBatch

STATE_TAG = "deepspeed"


def start_deepspeed() -> torch.device:
    """Join the ranks; returns the device of this one."""
    prepare_environment()
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed's own calls, once for every gather and reduction of ZeRO-3.
    warnings.filterwarnings("ignore", message=r".torch\.distributed\.\w+. is deprecated", category=FutureWarning)
    accelerator: Any = get_accelerator()
    if accelerator.device_name() == "cpu":
        # Its shared-memory collectives are compiled at the first start, 30 to 60 s; gloo does without.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # pyright: ignore[reportAttributeAccessIssue]
    deepspeed.init_distributed(dist_backend=accelerator.communication_backend_name(), verbose=False)
    local_rank = _local_rank()
    accelerator.set_device(local_rank)
    return torch.device(accelerator.device_name(local_rank) if accelerator.device_name() != "cpu" else "cpu")


def deepspeed_config(settings: RunSettings) -> dict[str, Any]:
    """DeepSpeed's configuration, with `deepspeed.config` merged over it."""
    chosen = settings.deepspeed
    zero: dict[str, Any] = {"stage": chosen.zero_stage}
    if chosen.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if chosen.offload_param:
        zero["offload_param"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0 if _is_plain(settings) else settings.actor.grad_clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": settings.model.dtype == "bfloat16"},
        "steps_per_print": 1 << 62,
    }
    return _merged(config, chosen.config)


class PolicyEngine:
    """The policy that is trained, on this rank."""

    def __init__(self, settings: RunSettings, policy: PolicyModel, ranks: Ranks, device: torch.device) -> None:
        import deepspeed

        self.device = device
        self._ranks = ranks
        self._zero3 = settings.deepspeed.zero_stage == 3
        self._optimizer = SkippableAdamW(
            policy.parameters(), settings.actor.optim, settings.actor.grad_clip if _is_plain(settings) else None
        )
        self._watch = FiniteWatch(policy)
        self._engine: Any = deepspeed.initialize(
            model=policy, optimizer=self._optimizer, config=deepspeed_config(settings)
        )[0]

    @property
    def policy(self) -> PolicyModel:
        """The module inside."""
        return self._engine.module

    def forward(self, micro: MicroBatch) -> TokenLogprobs:
        """Log-probs and entropy of the response tokens, with gradient."""
        return self._engine(micro)

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch) -> Tensor:
        """Log-probs [R] of the response tokens, without gradient."""
        return self._engine(micro).logprobs

    def backward(self, loss: Tensor) -> bool:
        """Add the gradient of `loss`, a share of the mean over all ranks; says whether it was finite."""
        self._engine.backward(loss * self._ranks.size)
        return self._watch.take()

    def update(self, lr: float, skip: bool) -> float:
        """Apply what was added up and forget it; returns the gradient's norm before clipping. Equal on every rank."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.skip_update = skip
        self._engine.step()
        norm = self._optimizer.grad_norm if self._optimizer.max_norm else self._engine.get_global_grad_norm()
        return float("nan") if skip or norm is None else float(norm)

    def train(self, mode: bool) -> None:
        """Switch dropout and the like on or off."""
        self._engine.train(mode)

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state into `folder`; every rank calls it."""
        self._engine.save_checkpoint(str(folder), tag=STATE_TAG, save_latest=False)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; every rank calls it."""
        path, _ = self._engine.load_checkpoint(str(folder), tag=STATE_TAG)
        if path is None:
            raise TrainingError(f"{folder} holds no state of this number of ranks; start with as many as wrote it")

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole weights, one at a time, tied ones once; every rank must run it to the end.

        Under ZeRO-3 each is gathered when its turn comes and let go afterwards.
        """
        import deepspeed

        for name, parameter in self.policy.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=self._zero3):
                yield name.removeprefix(LM_PREFIX), parameter.detach()

    def weight_shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and whole shape by Hugging Face name, in the order of `named_weights`."""
        return {
            name.removeprefix(LM_PREFIX): (p.dtype, tuple(getattr(p, "ds_shape", p.shape)))
            for name, p in self.policy.named_parameters()
        }


def _is_plain(settings: RunSettings) -> bool:
    """Neither ZeRO nor mixed precision: DeepSpeed then steps our optimizer directly and does not tell the norm."""
    return settings.deepspeed.zero_stage == 0 and settings.model.dtype == "float32"


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        old = merged.get(name)
        merged[name] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
