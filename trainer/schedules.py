"""Learning rates as a pure function of the training step: a run that is resumed needs no scheduler's state."""

import math

from protocol.settings.trainer import LrScheduler, OptimSettings


def learning_rate(optim: OptimSettings, step: int, total_steps: int) -> float:
    """Of training step `step` (from 1) out of `total_steps`: linear warm-up to `optim.lr`, then the scheduler's curve.

    The first step has a rate above zero and so has the last, whatever `min_lr_ratio` is: no batch is trained for
    nothing. A step beyond `total_steps` has the rate of the last.
    """
    warmup = num_warmup_steps(optim, total_steps)
    if step <= warmup:
        return optim.lr * step / warmup
    decay_steps = max(1, total_steps - warmup)
    progress = min(step - warmup - 1, decay_steps - 1) / decay_steps
    floor = optim.min_lr_ratio
    return optim.lr * (floor + (1 - floor) * _curve(optim.lr_scheduler_type, progress))


def num_warmup_steps(optim: OptimSettings, total_steps: int) -> int:
    """`lr_warmup_steps`, or the share `lr_warmup_steps_ratio` of all steps."""
    return optim.lr_warmup_steps or int(optim.lr_warmup_steps_ratio * total_steps)


def _curve(kind: LrScheduler, progress: float) -> float:
    """From 1 at `progress` 0 to 0 at 1."""
    match kind:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
