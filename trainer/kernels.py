"""What a loaded model computes with, besides its attention: Liger's fused kernels, where they are asked for.

Always true: kernels change speed and rounding, never parameters or their names; a kernel that can't run here is refused
in one sentence before anything is trained.
"""

import importlib
import importlib.util
from typing import Any

import torch
from transformers import PreTrainedModel

from protocol.errors import SettingsError
from protocol.settings.trainer import ModelSettings
from trainer.attention import PADDED_ATTENTION

LIGER_MODULE = "liger_kernel"
# The output layer is ours (`LogprobHead`): Liger's losses would compute it a second time.
LIGER_LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def check_kernels(model: ModelSettings, device_type: str) -> None:
    """Raise `SettingsError` where the kernels that are asked for can't run."""
    if not model.use_liger:
        return
    if device_type != "cuda":
        raise SettingsError(
            f"model.use_liger needs a CUDA GPU and the trainer runs on {device_type}: set model.use_liger = false"
        )
    if importlib.util.find_spec(LIGER_MODULE) is None:
        raise SettingsError(
            "model.use_liger needs the package liger-kernel: install it, or set model.use_liger = false"
        )


def apply_kernels(lm: PreTrainedModel, model: ModelSettings, device: torch.device) -> None:
    """Give `lm` the padded attention or Liger's kernels, as the settings say; raises `SettingsError` where it can't."""
    check_kernels(model, device.type)
    if not model.use_remove_padding:
        lm.set_attn_implementation(PADDED_ATTENTION)
    if model.use_liger:
        _apply_liger(lm)


def _apply_liger(lm: PreTrainedModel) -> None:
    """Patch this instance; Liger knows the model by its type."""
    transformers_part: Any = importlib.import_module(f"{LIGER_MODULE}.transformers.monkey_patch")
    kind = lm.config.model_type
    patch = transformers_part.MODEL_TYPE_TO_APPLY_LIGER_FN.get(kind)
    if patch is None:
        raise SettingsError(f"Liger has no kernels for {kind} models: set model.use_liger = false")
    patch(model=lm, **LIGER_LOSSES)
