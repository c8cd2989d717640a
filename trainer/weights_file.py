"""Writes a safetensors file one tensor at a time, so that a whole model is never in memory twice.

The format (https://github.com/huggingface/safetensors): 8 bytes of little-endian header size, a JSON header with
dtype, shape and byte range of every tensor, then the bytes. Shapes are known before the weights are gathered, so the
header is.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
ALIGNMENT = 8  # of the header, which the format asks for so that tensors can be mapped

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def write_weights(path: Path, shapes: Shapes, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write `weights`, which come in the order of `shapes`, to `path`, and flush it to the disk.

    The iterable is run to its end even when writing fails, because gathering the weights is a collective of all ranks;
    the first `OSError` is raised afterwards.
    """
    failure: OSError | None = None
    names = iter(shapes)
    with path.open("wb") as file:
        file.write(_header(shapes))
        for name, tensor in weights:
            expected = next(names)
            assert name == expected, f"{name} came where {expected} was announced"
            try:
                if failure is None:
                    file.write(_bytes(tensor))
            except OSError as error:
                failure = error
        if failure is None:
            file.flush()
            os.fsync(file.fileno())
    if failure is not None:
        raise failure


def _header(shapes: Shapes) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()
