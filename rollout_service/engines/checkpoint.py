"""What a Hugging Face model folder says about itself, read from its small files alone.

No weights are loaded here: names and shapes of tensors stand in the headers of the safetensors files, everything else
in `config.json` and `generation_config.json`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from protocol.errors import EngineError, WeightsError
from protocol.manifest import WeightsManifest

INDEX_NAME = "model.safetensors.index.json"
HEADER_LENGTH_BYTES = 8  # a safetensors file starts with the length of its JSON header as a little-endian u64
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
OUTPUT_LAYER = "lm_head.weight"

Shapes = Mapping[str, tuple[int, ...]]


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder. Raises `EngineError` if the folder is no model."""
    if not folder.is_dir():
        raise EngineError(f"model.path = {folder} does not exist; name a folder with a Hugging Face model")
    config = _read_json(folder / "config.json")
    if "model_type" not in config and "architectures" not in config:
        raise EngineError(f"{folder} is no Hugging Face model: it has no config.json that names one; check model.path")
    return config


def end_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end a response by the model's own word: `eos_token_id` of its config and its generation config."""
    found: dict[int, None] = {}
    for name in ("config.json", "generation_config.json"):
        eos: object = _read_json(folder / name).get("eos_token_id")
        ids = cast(list[object], eos) if isinstance(eos, list) else [eos]
        found.update({token: None for token in ids if isinstance(token, int)})
    return tuple(found)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model (multi-modal models nest it)."""
    nested = config.get("text_config")
    return cast(Mapping[str, Any], nested) if isinstance(nested, Mapping) else config


def kv_bytes_per_token(config: Mapping[str, Any], bytes_per_value: int) -> int:
    """Bytes of KV cache that one token takes: keys and values of every layer."""
    text = text_config(config)
    heads = int(text.get("num_attention_heads") or 1)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head_dim = int(text.get("head_dim") or int(text.get("hidden_size") or 0) // heads)
    return 2 * int(text.get("num_hidden_layers") or 0) * kv_heads * head_dim * bytes_per_value


def checkpoint_files(folder: Path) -> list[str]:
    """Names of the safetensors files of a model: those of its index, or all there are."""
    weight_map: object = _read_json(folder / INDEX_NAME).get("weight_map")
    if isinstance(weight_map, dict):
        return sorted({str(name) for name in cast(dict[str, object], weight_map).values()})
    return sorted(path.name for path in folder.glob("*.safetensors"))


def checkpoint_shapes(folder: Path) -> Shapes:
    """Names and shapes of the tensors that the model is started from. Raises `EngineError` without safetensors."""
    files = checkpoint_files(folder)
    try:
        shapes = {name: shape for file in files for name, shape in _file_shapes(folder / file).items()}
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"the weights in {folder} can't be read ({error}); check model.path") from error
    if not shapes:
        raise EngineError(f"{folder} has no *.safetensors files; save the model with save_pretrained")
    return shapes


def ties_embeddings(config: Mapping[str, Any]) -> bool:
    """Whether the output layer is the embedding."""
    return bool(config.get("tie_word_embeddings", text_config(config).get("tie_word_embeddings", False)))


def check_published(folder: Path, manifest: WeightsManifest, expected: Shapes, tied: bool) -> int:
    """Compare the tensors that were published with those the model has; their number.

    `tied`: the output layer is the embedding, so that `lm_head.weight` may be there or not. Raises `WeightsError`.
    """
    published: dict[str, tuple[int, ...]] = {}
    for file in manifest.files:
        try:
            published.update(_file_shapes(folder / file.name))
        except (OSError, ValueError, KeyError) as error:
            raise WeightsError(f"{folder / file.name} is no safetensors file; publish the folder again") from error
    optional = {OUTPUT_LAYER} if tied else set[str]()
    missing = sorted(expected.keys() - published.keys() - optional)
    unknown = sorted(published.keys() - expected.keys() - optional)
    if missing or unknown:
        lacks, name = ("lacks", missing[0]) if missing else ("has an unknown", unknown[0])
        raise WeightsError(
            f"{folder} {lacks} tensor {name} ({len(missing)} missing, {len(unknown)} unknown); publish the whole "
            "model under its Hugging Face names"
        )
    for name, shape in published.items():
        if expected.get(name, shape) != shape:
            raise WeightsError(f"{name} in {folder} has shape {shape}, the model needs {expected[name]}")
    return len(published)


def _file_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
        if not 0 < length <= MAX_HEADER_BYTES:
            raise ValueError(f"{path.name} is no safetensors file")
        header = json.loads(file.read(length))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: object = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise EngineError(f"{path} is not readable JSON; save the model again") from error
    return cast(dict[str, Any], content) if isinstance(content, dict) else {}
