"""Rules that tie the trainer's sections together. Each returns one sentence that says what to do, or None."""

from typing import TYPE_CHECKING

from protocol.settings.deepspeed_keys import config_problem
from protocol.settings.trainer import CriticSettings

if TYPE_CHECKING:
    from protocol.settings.run import RunSettings


def deepspeed_problem(settings: "RunSettings") -> str | None:
    """Options that DeepSpeed refuses together, or that would undo what the trainer relies on."""
    chosen = settings.deepspeed
    if chosen.offload_optimizer and chosen.zero_stage == 0:
        return "deepspeed.offload_optimizer needs deepspeed.zero_stage >= 1: set the stage, or leave it on the device"
    if chosen.offload_param and chosen.zero_stage < 3:
        return f"deepspeed.offload_param needs deepspeed.zero_stage = 3 and it is {chosen.zero_stage}: set one of them"
    return config_problem(chosen.config)


def critic_problem(settings: "RunSettings") -> str | None:
    """A critic where no estimator uses one."""
    estimator = settings.algorithm.adv_estimator
    if str(estimator) == "gae":
        return warmup_problem(settings, settings.trainer.total_training_steps)
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


def warmup_problem(settings: "RunSettings", num_steps: int | None) -> str | None:
    """A run of `num_steps` that would end before the policy is trained for the first time."""
    warmup = settings.trainer.critic_warmup
    if num_steps is None or warmup < num_steps:
        return None
    return (
        f"trainer.critic_warmup = {warmup} of {num_steps} training steps leaves none in which the policy trains: lower "
        "it, or raise trainer.total_training_steps"
    )


def warmup_notes(settings: "RunSettings", num_steps: int | None) -> list[str]:
    """Learning rates that a run of `num_steps` is too short to reach, a sentence each."""
    optims = {"actor": settings.actor.optim}
    if str(settings.algorithm.adv_estimator) == "gae":
        optims["critic"] = settings.critic.optim
    return [
        f"{name}.optim.lr_warmup_steps = {optim.lr_warmup_steps} is more than the {num_steps} training steps: the rate "
        f"ends at {optim.lr * num_steps / optim.lr_warmup_steps:g} and never reaches {name}.optim.lr = {optim.lr:g}"
        for name, optim in optims.items()
        if num_steps is not None and optim.lr_warmup_steps > num_steps
    ]


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
