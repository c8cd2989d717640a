"""Runs inside vLLM's workers: loads published weights from safetensors bytes whose checksum it verifies itself.

Always true:
- a file's bytes are hashed in the buffer that its tensors are then read from: what was checked is what is loaded;
- a load that fails leaves vLLM's reload machinery reset, so that the next one starts from its beginning;
- after a load the packed output layer was made again from its weight, and it answers like the published tensor.
"""

import hashlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

HEADER_LENGTH_BYTES = 8  # a safetensors file starts with the length of its JSON header as a little-endian u64
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
# It warns of every layer without tensors of its own, such as a tied output layer; completeness is checked here instead.
RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
PROBE_ROWS = 64  # vocabulary rows of the output layer that are compared: a stale layer differs in every one
PROBE_INPUTS = 4
ORPHAN_CHECK_INTERVAL_S = 1.0  # an engine whose service was killed holds memory for about this long


class RefusedWeightsError(Exception):
    """The bytes on disk are not what the manifest says, or the engine did not take them."""


@dataclass(slots=True)
class _Loaded:
    num_tensors: int = 0
    embedding: torch.Tensor | None = None  # [PROBE_ROWS, hidden]
    output: torch.Tensor | None = None  # [PROBE_ROWS, hidden]
    names: set[str] = field(default_factory=set[str])


class WeightsExtension:
    """Mixed into vLLM's worker class by `worker_extension_cls`; methods are called by `collective_rpc`."""

    def april_follow(self, service_pid: int) -> None:
        """End this process and the engine's core when the service that started them is gone."""
        service = psutil.Process(service_pid)
        threading.Thread(target=_end_with, args=(service, os.getppid()), daemon=True).start()

    def april_install(self, folder: str, files: list[list[str]], num_tensors: int) -> dict[str, Any]:
        """Load the safetensors `files` ([name, sha256 or '']) of `folder`; {'num_tensors': N} or {'refused': why}."""
        worker: Any = self
        loaded = _Loaded()
        logging.getLogger(RELOAD_LOGGER).setLevel(logging.ERROR)
        try:
            try:
                worker.reload_weights(weights_iterator=_read_tensors(Path(folder), files, loaded))
            except BaseException:
                _reset_reload(worker.get_model(), worker.model_config)
                raise
            _pack_output_layers(worker.get_model())
            if loaded.num_tensors != num_tensors:
                raise RefusedWeightsError(f"{loaded.num_tensors} tensors were loaded from {folder}, not {num_tensors}")
            _probe_output_layer(worker.get_model(), loaded, first_rank=worker.rank == 0)
        except RefusedWeightsError as error:
            return {"refused": str(error)}
        return {"num_tensors": loaded.num_tensors}


def _read_tensors(folder: Path, files: list[list[str]], loaded: _Loaded) -> Iterator[tuple[str, torch.Tensor]]:
    for name, sha256 in files:
        buffer = bytearray((folder / name).stat().st_size)
        with (folder / name).open("rb") as file:
            file.readinto(buffer)
        if sha256 and hashlib.sha256(buffer).hexdigest() != sha256:
            raise RefusedWeightsError(f"{folder / name} changed while it was loaded; publish the folder again")
        for tensor_name, tensor in _parse_safetensors(buffer):
            _keep_for_probe(tensor_name, tensor, loaded)
            yield tensor_name, tensor


def _parse_safetensors(buffer: bytearray) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of a safetensors file in memory; the tensors share its memory."""
    length = int.from_bytes(buffer[:HEADER_LENGTH_BYTES], "little")
    start = HEADER_LENGTH_BYTES + length
    header: dict[str, Any] = json.loads(buffer[HEADER_LENGTH_BYTES:start])
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise RefusedWeightsError(f"tensor {name} has dtype {entry['dtype']}; publish a floating-point dtype")
        if begin == end:
            yield name, torch.empty(entry["shape"], dtype=dtype)
        else:
            flat = torch.frombuffer(buffer, dtype=torch.uint8, offset=start + begin, count=end - begin)
            yield name, _aligned(flat, dtype).view(dtype).reshape(entry["shape"])


def _aligned(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes at an address that `dtype` may be read from; safetensors aligns its header, others may not."""
    return flat if flat.data_ptr() % dtype.itemsize == 0 else flat.clone()


def _keep_for_probe(name: str, tensor: torch.Tensor, loaded: _Loaded) -> None:
    loaded.num_tensors += 1
    if name in loaded.names:
        raise RefusedWeightsError(f"tensor {name} is in two of the published files; publish the folder again")
    loaded.names.add(name)
    if name.endswith("embed_tokens.weight"):
        loaded.embedding = tensor[:PROBE_ROWS].clone()
    elif name == "lm_head.weight":
        loaded.output = tensor[:PROBE_ROWS].clone()


def _reset_reload(model: torch.nn.Module, model_config: Any) -> None:
    """Leave vLLM's layer-wise reload after a failure: layers that wait for tensors would mix two loads."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, model_config)


def _pack_output_layers(model: torch.nn.Module) -> None:
    """Pack the output layers again: with tied embeddings on CPU a reload leaves the old packed weights in place."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            quant_method: Any = module.quant_method
            quant_method.process_weights_after_loading(module)


def _probe_output_layer(model: torch.nn.Module, loaded: _Loaded, first_rank: bool) -> None:
    """Raise unless the output layer computes with the published rows (the first rank holds the first of them)."""
    head: Any = getattr(model, "lm_head", None)
    rows = loaded.output if loaded.output is not None else loaded.embedding
    weight = getattr(head, "weight", None)
    if not first_rank or rows is None or not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
        return
    if getattr(head, "quant_config", None) is not None:
        return
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(PROBE_INPUTS, rows.shape[1], generator=generator).to(weight.device, weight.dtype)
    want = inputs.float() @ rows.to(weight.device, weight.dtype).float().T  # [PROBE_INPUTS, PROBE_ROWS]
    got = head.quant_method.apply(head, inputs)[:, : len(rows)].float()
    # Rounding grows with the size of the logits; half of the dtype's digits is far from both noise and staleness.
    tolerance = torch.finfo(weight.dtype).eps ** 0.5 * max(1e-6, float(want.abs().max()))
    if float((got - want).abs().max()) > tolerance:
        raise RefusedWeightsError(
            "the engine's output layer does not compute with the published weights after a reload"
        )


def _end_with(service: psutil.Process, parent_pid: int) -> None:
    while service.is_running() and service.status() != psutil.STATUS_ZOMBIE:
        time.sleep(ORPHAN_CHECK_INTERVAL_S)
    if parent_pid != service.pid and os.getppid() == parent_pid:  # the core, where workers are processes of their own
        os.kill(parent_pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
