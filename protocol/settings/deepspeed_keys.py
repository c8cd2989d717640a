"""Which keys of DeepSpeed's own configuration a run may set, and what to use instead of the others."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

# Keys of `deepspeed.config` that the trainer's arithmetic rests on, and what to use instead.
DECIDED_KEYS: Mapping[str, str] = {
    "amp": "model.dtype",
    "autotuning": "nothing: it starts runs of its own",
    "bf16.enabled": "model.dtype",
    "bfloat16": "model.dtype",
    "checkpoint.load_universal": "nothing: a checkpoint of another number of ranks is converted by itself",
    "checkpoint.use_node_local_storage": "nothing: a restart reads the folder of the run, whichever machine it is on",
    "checkpoint.writer": "nothing: a checkpoint must be whole when it is acknowledged",
    "compression_training": "nothing: the engines serve the weights as they are trained",
    "curriculum_learning": "nothing: the service chooses the prompts",
    "data_efficiency": "nothing: the service chooses the prompts",
    "datastates_ckpt": "nothing: a checkpoint must be whole when it is acknowledged",
    "elasticity": "nothing: a checkpoint of another number of ranks is converted by itself",
    "expert_parallel": "nothing: the trainer has data parallelism and ZeRO",
    "fp16": "model.dtype",
    "gradient_accumulation_steps": "actor.ppo_max_token_len_per_gpu",
    "gradient_allreduce_op": "nothing: the loss is already a mean over the tokens of all ranks",
    "gradient_clipping": "actor.grad_clip",
    "hybrid_engine": "nothing: the rollout service generates",
    "managed_gradient_accumulation": "actor.ppo_max_token_len_per_gpu",
    "nebula": "nothing: a checkpoint must be whole when it is acknowledged",
    "optimizer": "actor.optim",
    "pipeline": "nothing: the trainer has no pipeline stages",
    "progressive_layer_drop": "nothing: log-probs must be those of the whole model",
    "quantize_training": "nothing: the engines serve the weights as they are trained",
    "scheduler": "actor.optim.lr_scheduler_type",
    "sequence_parallel_size": "actor.ulysses_sequence_parallel_size",
    "tensor_parallel": "nothing: the trainer has data parallelism and ZeRO",
    "torch_autocast": "model.dtype",
    "train_batch_size": "actor.ppo_mini_batch_size",
    "train_micro_batch_size_per_gpu": "actor.ppo_max_token_len_per_gpu",
    "weight_quantization": "nothing: the engines serve the weights as they are trained",
    "zero_allow_untested_optimizer": "nothing: the trainer's AdamW is the one that is tested",
    "zero_force_ds_cpu_optimizer": "nothing: the trainer's AdamW is the one that is tested",
    "zero_optimization.stage": "deepspeed.zero_stage",
}
# The others that DeepSpeed 0.19 reads; of a key that it does not read it says nothing.
FREE_KEYS = frozenset(
    {
        *("activation_checkpointing", "aio", "bf16", "checkpoint", "comet", "comms_logger", "communication_data_type"),
        *("compile", "csv_monitor", "data_types", "dataloader_drop_last", "disable_allgather"),
        *("disable_python_gc", "dump_state", "flops_profiler", "gradient_predivide_factor"),
        *("log_level", "memory_breakdown", "prescale_gradients", "seq_parallel_communication_data_type"),
        *("sparse_gradients", "steps_per_print", "tensorboard", "timers"),
        *("vocabulary_size", "wall_clock_breakdown", "wandb", "zero_optimization"),
    }
)


def config_problem(config: Mapping[str, Any]) -> str | None:
    """One sentence on the first key that the trainer decides or that DeepSpeed does not read."""
    for key in _dotted(config):
        for decided, instead in DECIDED_KEYS.items():
            whole = decided.startswith(f"{key}.") and _at(config, key) != {}  # such as zero_optimization = true
            if key == decided or key.startswith(f"{decided}.") or whole:
                why = instead.removeprefix("nothing: ")
                remedy = f"remove it and use {instead}" if why == instead else f"remove it, since {why}"
                return f"deepspeed.config sets {key}, which the trainer decides: {remedy}"
    for key in config:
        if key not in FREE_KEYS and key not in {decided.partition(".")[0] for decided in DECIDED_KEYS}:
            near = difflib.get_close_matches(key, [*FREE_KEYS, *DECIDED_KEYS], n=1, cutoff=0.0)[0]
            return f"deepspeed.config sets {key}, which DeepSpeed does not read; did you mean {near}?"
    return None


def _at(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
