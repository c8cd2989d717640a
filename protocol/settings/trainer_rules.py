"""Rules that tie the trainer's sections together. Each returns one sentence that says what to do, or None."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from protocol.settings.trainer import CriticSettings

if TYPE_CHECKING:
    from protocol.settings.run import RunSettings

# Keys of `deepspeed.config` that the trainer's arithmetic rests on, and what to use instead.
DECIDED_KEYS: Mapping[str, str] = {
    "amp": "model.dtype",
    "bf16.enabled": "model.dtype",
    "checkpoint.load_universal": "nothing: a checkpoint of another number of ranks is converted by itself",
    "fp16": "model.dtype",
    "gradient_accumulation_steps": "actor.ppo_max_token_len_per_gpu",
    "gradient_clipping": "actor.grad_clip",
    "managed_gradient_accumulation": "actor.ppo_max_token_len_per_gpu",
    "optimizer": "actor.optim",
    "pipeline": "nothing: the trainer has no pipeline stages",
    "scheduler": "actor.optim.lr_scheduler_type",
    "sequence_parallel_size": "actor.ulysses_sequence_parallel_size",
    "tensor_parallel": "nothing: the trainer has data parallelism and ZeRO",
    "torch_autocast": "model.dtype",
    "train_batch_size": "actor.ppo_mini_batch_size",
    "train_micro_batch_size_per_gpu": "actor.ppo_max_token_len_per_gpu",
    "zero_allow_untested_optimizer": "nothing: the trainer's AdamW is the one that is tested",
    "zero_force_ds_cpu_optimizer": "nothing: the trainer's AdamW is the one that is tested",
    "zero_optimization.stage": "deepspeed.zero_stage",
}


def deepspeed_problem(settings: "RunSettings") -> str | None:
    """Options that DeepSpeed refuses together, or that would undo what the trainer relies on."""
    chosen = settings.deepspeed
    if chosen.offload_optimizer and chosen.zero_stage == 0:
        return "deepspeed.offload_optimizer needs deepspeed.zero_stage >= 1: set the stage, or leave it on the device"
    if chosen.offload_param and chosen.zero_stage < 3:
        return f"deepspeed.offload_param needs deepspeed.zero_stage = 3 and it is {chosen.zero_stage}: set one of them"
    for key in _dotted(chosen.config):
        for decided, instead in DECIDED_KEYS.items():
            if key == decided or key.startswith(f"{decided}."):
                return f"deepspeed.config sets {key}, which the trainer decides: remove it and use {instead}"
    return None


def critic_problem(settings: "RunSettings") -> str | None:
    """A critic where no estimator uses one."""
    estimator = settings.algorithm.adv_estimator
    if str(estimator) == "gae":
        return None
    if settings.critic != CriticSettings():
        return (
            f"critic.* needs algorithm.adv_estimator = 'gae' and it is '{estimator}': set that, or remove the section"
        )
    if settings.trainer.critic_warmup:
        return (
            f"trainer.critic_warmup needs algorithm.adv_estimator = 'gae' and it is '{estimator}': "
            "set that, or leave the warm-up out"
        )
    return None


def optim_problem(settings: "RunSettings") -> str | None:
    """A learning rate that is described twice."""
    for name, optim in (("actor", settings.actor.optim), ("critic", settings.critic.optim)):
        if optim.lr_warmup_steps and optim.lr_warmup_steps_ratio:
            return f"{name}.optim has lr_warmup_steps and lr_warmup_steps_ratio: leave one of them at 0"
        if optim.min_lr_ratio and optim.lr_scheduler_type == "constant":
            return f"{name}.optim.min_lr_ratio needs lr_scheduler_type = 'cosine' or 'linear': set that, or leave it 0"
    return None


def lora_problem(settings: "RunSettings") -> str | None:
    """Adapters without a place, or a place without adapters."""
    model = settings.model
    if model.lora_rank and not model.target_modules:
        return "model.target_modules is empty: name the layers that get an adapter, or say 'all-linear'"
    adapters = model.model_dump(include={"lora_alpha", "target_modules"}, exclude_defaults=True)
    if not model.lora_rank and adapters:
        return "model.lora_alpha and model.target_modules need model.lora_rank >= 1: set it, or remove them"
    return None


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
