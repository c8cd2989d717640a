"""From the run's settings to the arguments and the environment of vLLM; imports neither vllm nor torch by itself."""

import hashlib
import math
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from protocol.errors import EngineError, SettingsError
from protocol.settings.run import RunSettings
from rollout_service.engines.checkpoint import kv_bytes_per_token, read_config, text_config
from rollout_service.engines.interface import GenerationRequest

WORKER_EXTENSION = "rollout_service.engines.vllm_worker.WeightsExtension"
MAX_DEFAULT_KV_BYTES = 4 << 30  # a CPU engine shares its memory with the trainer; more must be asked for
BLOCK_TOKENS = 128  # vLLM's block on CPU: every sequence wastes up to one
MIN_SPARE_BLOCKS = 2  # vLLM keeps one null block, and one sequence must fit beside it
BYTES_OF_DTYPE = {"float32": 4, "float": 4, "half": 2, "float16": 2, "bfloat16": 2}
SEED_BITS = 31  # torch seeds of every backend fit

# Read by vLLM at import or by its children; what the user set stays.
COMMON_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings at every start are about choices that were made here
    # A forked engine would keep this service's sockets open after its death.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
# The worker inside the core's process starts in half the time and is not bound to one core.
CPU_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def prepare_environment() -> bool:
    """Set what vLLM reads from the environment; must run before its first import. Whether it will run on a CPU."""
    if find_spec("vllm") is None:
        raise SettingsError(
            "engine.backend needs vLLM, which is not installed: install april-rollout[service-cpu] or "
            "april-rollout[service-gpu]"
        )
    import torch

    on_cpu = not torch.cuda.is_available()
    for name, value in (COMMON_ENVIRONMENT | (CPU_ENVIRONMENT if on_cpu else {})).items():
        os.environ.setdefault(name, value)
    return on_cpu


@contextmanager
def child_environment(settings: RunSettings, on_cpu: bool, eager: bool) -> Generator[None]:
    """Environment of the engine's own process, for as long as it is being started."""
    # Its imports warn of other libraries' deprecations, which is nothing that a user of the service can act on.
    changes = {"PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore")}
    if on_cpu and eager:
        # vLLM's sampler is compiled even in eager mode: 2 to 15 s at the first token, for nothing that is measurable.
        changes["TORCHDYNAMO_DISABLE"] = os.environ.get("TORCHDYNAMO_DISABLE", "1")
    if on_cpu:
        num_threads = settings.engine.num_threads or num_usable_cores()
        changes["OMP_NUM_THREADS"] = str(num_threads)
        # Threads that spin at a barrier while a trainer has their core make decoding several times slower.
        changes["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "passive")
        # Only vLLM's multi-process executor reads it; without it that one would bind itself to one core.
        changes["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def num_usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def engine_seed(run_seed: int, worker: str, epoch: int) -> int:
    """Seed of a replica's own generator: no two replicas, and no two lives of one, repeat each other's samples."""
    digest = hashlib.blake2b(f"{run_seed}/{worker}/{epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def engine_arguments(settings: RunSettings, on_cpu: bool, seed: int) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs. Raises `EngineError` if the model's folder is no model."""
    engine = settings.engine
    config = read_config(model_folder(settings))
    dtype = "float32" if engine.dtype == "auto" and on_cpu else engine.dtype
    arguments: dict[str, Any] = {
        "model": str(model_folder(settings)),
        "skip_tokenizer_init": True,
        "load_format": "safetensors",
        "dtype": dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "tensor_parallel_size": engine.tensor_model_parallel_size,
        "enforce_eager": on_cpu if engine.enforce_eager is None else engine.enforce_eager,
        "enable_prefix_caching": engine.enable_prefix_caching,
        # The behaviour log-probs: of the distribution that was sampled from, temperature included.
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": WORKER_EXTENSION,
        "seed": seed,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if engine.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = engine.max_num_batched_tokens
    if engine.kv_cache_memory_bytes is not None or on_cpu:
        arguments["kv_cache_memory_bytes"] = engine.kv_cache_memory_bytes or default_kv_bytes(settings, config, dtype)
    return arguments | engine.extra


def default_kv_bytes(settings: RunSettings, config: Mapping[str, Any], dtype: str) -> int:
    """KV cache for every slot at full length, at most 4 GiB, and never less than one full sequence needs."""
    named = dtype if dtype != "auto" else str(text_config(config).get("dtype") or config.get("torch_dtype"))
    per_block = BLOCK_TOKENS * kv_bytes_per_token(config, BYTES_OF_DTYPE.get(named, 4))
    blocks_of_one = math.ceil(settings.max_model_len / BLOCK_TOKENS)
    wanted = (settings.engine.max_num_seqs * blocks_of_one + MIN_SPARE_BLOCKS) * per_block
    least = (blocks_of_one + MIN_SPARE_BLOCKS) * per_block
    return max(min(wanted, MAX_DEFAULT_KV_BYTES), least)


def model_folder(settings: RunSettings) -> Path:
    """Folder of the model as it starts."""
    if settings.model.path is None:
        raise SettingsError("model.path is not set; name a folder with a Hugging Face model")
    return Path(settings.model.path)


def check_request(request: GenerationRequest, max_model_len: int, takes_seeds: bool) -> None:
    """Raise `EngineError` for a request that the engine would refuse or die of."""
    num_tokens, budget = len(request.prompt_token_ids), request.sampling.max_tokens
    if num_tokens == 0:
        raise EngineError(f"request {request.request_id} has no tokens; send at least one")
    if budget < 1:
        raise EngineError(f"request {request.request_id} has no budget left; finish it with the reason length instead")
    if num_tokens + budget > max_model_len:
        raise EngineError(
            f"request {request.request_id} needs {num_tokens} + {budget} tokens, the context has {max_model_len}: "
            "raise engine.max_model_len, or shorten data.max_prompt_length or data.max_response_length"
        )
    if request.sampling.seed is not None and not takes_seeds:
        raise EngineError(f"request {request.request_id} carries a seed, which this engine does not take; leave it out")
