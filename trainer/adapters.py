"""LoRA through peft: adapters in place inside the Hugging Face model, merged weight by weight for publishing.

Always true: with adapters only they are trained and everything else is frozen; a fresh adapter changes nothing, since
its second matrix is zero; what is published is base weight plus adapter under the base weight's own name, so that an
engine never learns of adapters; switched off, the model is bit for bit the one it started as.
"""

import json
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from protocol.errors import SettingsError
from protocol.settings.trainer import ModelSettings
from trainer.weights_file import write_weights

ADAPTER_NAME = "default"  # peft's own name of the only one
ADAPTER_FOLDER = "adapter"
ALL_LINEAR = "all-linear"
BASE_PART = ".base_layer."
ADAPTER_PARTS = (".lora_A.", ".lora_B.")
PEFT_PREFIX = "base_model.model."  # what peft puts before every name in an adapter's file


def add_adapters(lm: PreTrainedModel, model: ModelSettings) -> None:
    """Freeze `lm` and put an adapter beside each layer of `model.target_modules`, in place."""
    from peft import inject_adapter_in_model

    config = _lora_config(model)
    _check_targets(lm, config)
    lm.requires_grad_(False)
    try:
        inject_adapter_in_model(config, lm, ADAPTER_NAME)
    except ValueError as error:
        raise SettingsError(
            f"model.target_modules = {model.target_modules!r} does not fit this model: {error}"
        ) from error


def _check_targets(lm: PreTrainedModel, config: Any) -> None:
    """Raise `SettingsError` for a target whose adapter could not be merged into one weight of one linear layer."""
    from peft.tuners.tuners_utils import check_target_module_exists

    if config.target_modules == ALL_LINEAR:
        return
    for name, layer in lm.named_modules():
        linear = isinstance(layer, nn.Linear) and layer is not lm.get_output_embeddings()
        if not linear and check_target_module_exists(config, name):
            raise SettingsError(
                f"model.target_modules names {name}, which is not a linear layer below the output layer: "
                f"name others, or say '{ALL_LINEAR}'"
            )


def _lora_config(model: ModelSettings) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=model.lora_rank, lora_alpha=model.lora_alpha, target_modules=model.target_modules, task_type="CAUSAL_LM"
    )


@contextmanager
def adapters_off(lm: nn.Module) -> Generator[None]:
    """The model as it started, within the block."""
    layers = [layer for _, layer in _lora_layers(lm)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapter_layers(lm: nn.Module) -> dict[str, Any]:
    """The layer with an adapter by the name of its weight's parameter."""
    return {f"{name}{BASE_PART}weight": layer for name, layer in _lora_layers(lm)}


def merged_weight(layer: Any) -> Tensor:
    """Base weight plus adapter, in the base weight's dtype; the sum is made in float32."""
    weight = layer.base_layer.weight
    down, up = layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight
    delta = up.float() @ down.float() * layer.scaling[ADAPTER_NAME]
    return (weight.float() + delta).to(weight.dtype)


def published_name(name: str) -> str:
    """The Hugging Face name of a parameter; empty for an adapter's own."""
    if any(part in name for part in ADAPTER_PARTS):
        return ""
    return name.replace(BASE_PART, ".")


def save_adapter(lm: nn.Module, model: ModelSettings, folder: Path, zero3: bool, is_main: bool) -> None:
    """Write the adapter as peft reads it (`adapter_config.json`, safetensors); every rank calls it, rank 0 writes."""
    named = [(n, p) for n, p in lm.named_parameters() if any(part in n for part in ADAPTER_PARTS)]
    shapes = {_peft_name(n): (p.dtype, tuple(getattr(p, "ds_shape", p.shape))) for n, p in named}
    weights = _gathered(named, zero3)
    if not is_main:
        for _ in weights:
            pass
        return
    folder.mkdir()
    write_weights(folder / "adapter_model.safetensors", shapes, weights)
    config = {k: sorted(v) if isinstance(v, set) else v for k, v in _lora_config(model).to_dict().items()}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1, default=str))


def _peft_name(name: str) -> str:
    return f"{PEFT_PREFIX}{name.replace(f'.{ADAPTER_NAME}.', '.')}"


def _gathered(named: Iterable[tuple[str, nn.Parameter]], zero3: bool) -> Iterator[tuple[str, Tensor]]:
    import deepspeed

    for name, parameter in named:
        with deepspeed.zero.GatheredParameters([parameter], enabled=zero3):
            yield _peft_name(name), parameter.detach()


def _lora_layers(lm: nn.Module) -> list[tuple[str, Any]]:
    return [
        (name, layer) for name, layer in lm.named_modules() if hasattr(layer, "lora_A") and hasattr(layer, "scaling")
    ]
