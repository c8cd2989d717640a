"""What a trainer's checkpoint belongs to: the settings that its tensors, or its count of steps, depend on.

Always true: these and the number of ranks are all that a checkpoint knows of its RUN.toml. Everything else may change
between two starts: rates and schedules, losses and corrections, the reference, micro-batches, offload, the number of
ranks, how often is saved and evaluated, and how long is trained.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protocol.settings import RunSettings

# What is in a checkpoint of each stage: all on every rank; parameters whole and moments in parts; all in parts.
LAYOUTS = ("whole", "moments sharded", "moments sharded", "all sharded")


def identity(settings: RunSettings) -> dict[str, Any]:
    """By the names of the settings, as JSON."""
    model = settings.model
    chosen: dict[str, Any] = {
        "run.name": settings.run.name,
        "data.train_batch_size": settings.data.train_batch_size,
        "model.path": _resolved(model.path),
        "model.dtype": model.dtype,
        "model.lora_rank": model.lora_rank,
        "deepspeed.zero_stage": settings.deepspeed.zero_stage,
    }
    if model.lora_rank:
        chosen |= {"model.lora_alpha": model.lora_alpha, "model.target_modules": model.target_modules}
    if has_critic(settings):
        chosen["critic.model.path"] = _resolved(settings.critic.model.path or model.path)
    return chosen


def differences(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """Each that keeps a checkpoint of `theirs` from being read with `mine`, as words."""
    return [
        f"{name} was {theirs.get(name, 'not set')} and is {mine.get(name, 'not set')}"
        for name in dict.fromkeys([*theirs, *mine])
        if not _equal(name, theirs.get(name), mine.get(name))
    ]


def has_critic(settings: RunSettings) -> bool:
    """Whether a value network trains beside the policy."""
    return str(settings.algorithm.adv_estimator) == "gae"


def _equal(name: str, a: Any, b: Any) -> bool:
    if name == "deepspeed.zero_stage" and isinstance(a, int) and isinstance(b, int):
        return LAYOUTS[a] == LAYOUTS[b]
    return a == b


def _resolved(path: Path | None) -> str | None:
    return str(path.resolve()) if path else None
