"""DeepSpeed: how this process joins the ranks, and the configuration that is made from the run's settings."""

import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from protocol.settings import RunSettings
from trainer.distributed import prepare_environment

NEVER = 1 << 62  # steps between two reports of DeepSpeed's own: the trainer reports


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
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    accelerator.set_device(local_rank)
    return torch.device(accelerator.device_name(local_rank) if accelerator.device_name() != "cpu" else "cpu")


def deepspeed_config(settings: RunSettings, grad_clip: float) -> dict[str, Any]:
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
        "gradient_clipping": 0.0 if clips_itself(settings) else grad_clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": settings.model.dtype == "bfloat16"},
        "steps_per_print": NEVER,
    }
    return _merged(config, chosen.config)


def clips_itself(settings: RunSettings) -> bool:
    """Neither ZeRO nor mixed precision: DeepSpeed then steps our optimizer directly and does not tell the norm."""
    return settings.deepspeed.zero_stage == 0 and settings.model.dtype == "float32"


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        old = merged.get(name)
        merged[name] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
