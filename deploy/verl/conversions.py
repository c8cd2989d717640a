"""Conversions of single parameters that need more than a name: each is a `Rule`, or makes one."""

import re
from typing import Any

from deploy.verl.outcome import ACTOR, Outcome, Rule, Script, Status

REJECTION = re.compile(r"(token|seq_sum|seq_mean|seq_max)_(k[123])$")
OLD_REJECTION = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
MODULE = re.compile(r"[A-Za-z_]\w*$")


def is_hub_name(setting: str, value: Any) -> bool:
    """Whether the path in `setting` is written as `owner/name`, which verl would download."""
    return setting.endswith(".path") and isinstance(value, str) and re.fullmatch(HUB_NAME, value) is not None


def path(value: Any, _: Script) -> Outcome:
    """The policy's path; a name on the Hub is kept, and said to be one."""
    hub = is_hub_name("model.path", value)
    reason = "a name on the Hub; nothing is downloaded: put the model into this folder, or give another" if hub else ""
    return Outcome(Status.CHANGED if hub else Status.CARRIED, {"model.path": value}, reason)


def clip_ratio(value: Any, script: Script) -> Outcome:
    """Both clips, save those that are given apart."""
    ours = {side: f"actor.clip_ratio_{side}" for side in ("low", "high")}
    sets = {name: value for side, name in ours.items() if not script.has(f"{ACTOR}.clip_ratio_{side}")}
    if not sets:
        return Outcome(Status.NOT_CARRIED, {}, "clip_ratio_low and clip_ratio_high are given, and they count")
    return Outcome(Status.CHANGED, sets, "the lower and the upper clip are settings of their own")


def micro_batch(value: Any, script: Script) -> Outcome:
    """Samples of one micro-batch, where verl looks at them."""
    if script.dynamic:
        return Outcome(Status.NOT_CARRIED, {}, "with use_dynamic_bsz micro-batches are bounded in tokens, also in verl")
    return Outcome(Status.CARRIED, {"actor.ppo_micro_batch_size_per_gpu": value}, "samples of one micro-batch")


def micro_batch_of_all(value: Any, script: Script) -> Outcome:
    """The same, counted over all GPUs."""
    if script.dynamic or value is None or script.has(f"{ACTOR}.ppo_micro_batch_size_per_gpu"):
        return Outcome(Status.NOT_CARRIED, {}, "does not count beside use_dynamic_bsz or the size for one GPU")
    ranks = script.value("trainer.n_gpus_per_node", 8) * script.value("trainer.nnodes", 1)
    size = max(1, value // ranks)
    return Outcome(Status.CHANGED, {"actor.ppo_micro_batch_size_per_gpu": size}, f"counts all {ranks} GPUs in verl")


def kl_loss_type(value: Any, _: Script) -> Outcome:
    """The estimator, without verl's mark for a straight-through gradient."""
    plain = value.removesuffix("+") if isinstance(value, str) else value
    reason = "the straight-through form is not offered" if plain != value else ""
    return Outcome(Status.CHANGED if reason else Status.CARRIED, {"actor.kl_loss_type": plain}, reason)


def overlong(ours: str) -> Rule:
    """DAPO's soft penalty, if it is switched on."""

    def rule(value: Any, script: Script) -> Outcome:
        prefixes = ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg")
        if not any(script.value(f"{prefix}.enable", False) for prefix in prefixes):
            return Outcome(Status.NOT_CARRIED, {}, "overlong_buffer.enable is off")
        return Outcome(Status.CARRIED, {ours: value}, "DAPO's soft penalty")

    return rule


def filter_groups(value: Any, _: Script) -> Outcome:
    """DAPO's filter of groups without spread."""
    ours = {"algorithm.groups_without_spread": "filter" if value else "keep"}
    reason = "such groups are left out of the update; the batch is not filled up with others" if value else ""
    return Outcome(Status.CHANGED if value else Status.CARRIED, ours, reason)


def save_freq(value: Any, _: Script) -> Outcome:
    """Steps between checkpoints; never is not offered."""
    if value is not None and value > 0:
        return Outcome(Status.CARRIED, {"trainer.save_freq": value}, "a batch is durable once a checkpoint holds it")
    return Outcome(
        Status.NOT_CARRIED, {}, "never saving is not offered: batches are kept for replay until one is saved"
    )


def rejection(value: Any, _: Script) -> Outcome:
    """Rejection sampling: estimate, level and reduction in one word."""
    if value is None:
        return Outcome(Status.CARRIED, {"algorithm.rejection": "none"})
    match = REJECTION.match(OLD_REJECTION.get(str(value), str(value)))
    if match is None:
        return Outcome(Status.NOT_CARRIED, {}, "only one rejection by k1, k2 or k3 is offered; see algorithm.rejection")
    level, estimate = match.groups()
    sets = {"algorithm.rejection": estimate, "algorithm.rejection_level": "token" if level == "token" else "sequence"}
    if level != "token":
        sets["algorithm.rejection_reduce"] = level.removeprefix("seq_")
    return Outcome(Status.CHANGED, sets, "the estimate, its level and its mean or sum are settings of their own")


def _bounds(value: Any) -> tuple[float, float] | None:
    """`0.99_1.01`, verl's form of two bounds."""
    parts = value.split("_") if isinstance(value, str) else []
    return (float(parts[0]), float(parts[1])) if len(parts) == 2 else None


def rejection_threshold(value: Any, script: Script) -> Outcome:
    """Its upper bound, or both; a single bound of k1 has 1/bound below it, which is the same either way round."""
    bounds = _bounds(value)
    if bounds is None:
        return Outcome(Status.CARRIED, {} if value is None else {"algorithm.rejection_upper": float(value)})
    lower, upper = bounds
    if str(script.value("algorithm.rollout_correction.rollout_rs")).endswith("_k1"):
        sets = {"algorithm.rejection_lower": 1 / upper, "algorithm.rejection_upper": 1 / lower}
        return Outcome(Status.CHANGED, sets, "verl's k1 bounds behaviour/proximal, ours the ratio proximal/behaviour")
    return Outcome(
        Status.CHANGED, {"algorithm.rejection_lower": lower, "algorithm.rejection_upper": upper}, "two settings"
    )


def weight_threshold(value: Any, _: Script) -> Outcome:
    """The cap of the importance weight, or IcePop's band."""
    bounds = _bounds(value)
    if bounds:
        return Outcome(Status.CHANGED, {"algorithm.correction_band": list(bounds)}, "IcePop: weights outside become 0")
    return Outcome(Status.CARRIED, {"algorithm.correction_cap": float(value)})


def weight_level(value: Any, _: Script) -> Outcome:
    """What one importance weight is the product over."""
    if value is None or value is False:
        return Outcome(Status.NOT_CARRIED, {}, "the weight stays on: here tokens of older versions are the normal case")
    level = "token" if value is True else value
    return Outcome(Status.CARRIED, {"algorithm.correction": "decoupled", "algorithm.correction_level": level})


def bypass(value: Any, _: Script) -> Outcome:
    """Behaviour or proximal policy under the ratio."""
    mode = "behaviour" if value else "decoupled"
    return Outcome(Status.CHANGED, {"algorithm.correction": mode}, "what the ratio is held against has a name here")


def pure_gradient(value: Any, _: Script) -> Outcome:
    """A loss without clip."""
    if value in (True, "reinforce"):
        return Outcome(Status.CHANGED, {"actor.policy_loss": "reinforce"}, "no clip, only the correction's weight")
    return Outcome(Status.CARRIED, {}, "the clipped loss is the default")


def truncated(name: str, neutral: Any) -> Rule:
    """Truncated sampling, which is refused unless a user insists."""

    def rule(value: Any, _: Script) -> Outcome:
        if value == neutral:
            return Outcome(Status.CARRIED, {name: value})
        reason = f"biases the importance ratios; if you accept that, set {name} and rollout.allow_truncated_sampling"
        return Outcome(Status.NOT_CARRIED, {}, reason)

    return rule


def trackers(value: Any, _: Script) -> Outcome:
    """Those that are offered."""
    named = value if isinstance(value, list) else [value]
    ours = [name for name in named if name in ("console", "tensorboard", "wandb", "mlflow")]
    lost = [str(name) for name in named if name not in ours]
    reason = f"JSONL is added; {', '.join(lost)} is not offered" if lost else "JSONL is added: it costs nothing"
    return Outcome(Status.CHANGED, {"trainer.logger": [*ours, "jsonl"]}, reason)


def ranks(value: Any, _: Script) -> Outcome:
    """GPUs of one machine."""
    return Outcome(
        Status.CHANGED, {"trainer.n_gpus_per_node": value}, "ranks of the trainer alone: engines need GPUs of their own"
    )


def reward_function(value: Any, script: Script) -> Outcome:
    """A scorer in a file becomes `module:function`."""
    if value is None:
        return Outcome(Status.CARRIED)
    module = str(value).rsplit("/", 1)[-1].removesuffix(".py")
    function = script.value("custom_reward_function.name", "compute_score")
    if not MODULE.match(module):
        return Outcome(Status.NOT_CARRIED, {}, "give it as reward.name = 'module:function'")
    sets = {"reward.name": f"{module}:{function}"}
    return Outcome(Status.CHANGED, sets, "module:function; its folder must be on PYTHONPATH of the service")


def engine_mode(value: Any, _: Script) -> Outcome:
    """The engine."""
    if value == "vllm":
        return Outcome(Status.CARRIED, {}, "vLLM is the engine")
    return Outcome(Status.NOT_CARRIED, {}, f"{value} is not offered: the engine is vLLM")
