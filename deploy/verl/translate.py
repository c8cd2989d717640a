"""From a script's overrides to the settings of a run, with a row for everything that became of them.

Always true: every override has exactly one row; a setting is written only if this version has it and takes the value,
which is looked up in the settings themselves; what comes from verl's own defaults or from here is a row, too.
"""

import difflib
import functools
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from deploy.verl.conversions import is_hub_name
from deploy.verl.outcome import ACTOR, MODEL, ROLLOUT, Outcome, Script, Status
from deploy.verl.overrides import Override
from deploy.verl.rules import RULES
from deploy.verl.shell import Note
from protocol.settings import RunSettings, iter_fields

# verl's own defaults that differ from ours: a script that leaves them out means them.
VERL_DEFAULTS: Mapping[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{MODEL}.enable_gradient_checkpointing": True,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.val_kwargs.do_sample": False,
    f"{ACTOR}.use_dynamic_bsz": False,
    "trainer.total_epochs": 30,
    "trainer.val_before_train": True,
}
# What verl has no word for.
ADDED: Mapping[str, tuple[Any, str]] = {
    "model.dtype": ("bfloat16", "verl trains in mixed precision; DeepSpeed keeps float32 weights beside these"),
    "deepspeed.zero_stage": (3, "FSDP shards weights, gradients and optimizer, as ZeRO-3 does"),
    "rollout.ratio": (
        1.25,
        "N'/N: starts a quarter more groups than a batch has, ends as soon as N are finished; 1.0 is verl's way",
    ),
    "rollout.lookahead": (1, "batches ahead of the trainer; 0 waits for each step as verl does"),
    "rollout.max_lag": (4, "no trained token is older than this many versions; 0 lag needs ratio 1 and lookahead 0"),
}
CRITIC_PREFIX = "critic."


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `key` is verl's, empty where a row is only ours."""

    key: str
    value: Any
    status: Status
    settings: tuple[str, ...]
    written: tuple[Any, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Translation:
    """`values` by section, for RUN.toml; `comments` by dotted name."""

    rows: list[Row]
    values: dict[str, Any]
    comments: dict[str, str]


def translate(overrides: Sequence[Override], notes: Sequence[Note] = ()) -> Translation:
    """Settings for all `overrides`, with verl's defaults and what is new here added, and a row for each note."""
    script = Script({o.key: o for o in overrides})
    flat: dict[str, Any] = {}
    rows: list[Row] = []
    comments: dict[str, str] = {}
    for override in overrides:
        outcome = _checked(_outcome(override, script))
        flat |= outcome.sets
        rows.append(_row(override.key, override.text, outcome))
    for key, value in _missing_defaults(script).items():
        outcome = _checked(RULES[key](value, script))
        names = [name for name in outcome.sets if name not in flat]
        if names:
            reason = "verl's default, which the script leaves as it is"
            flat |= {name: outcome.sets[name] for name in names}
            rows.append(_row(key, "", Outcome(Status.ADDED, {name: outcome.sets[name] for name in names}, reason)))
    for name, (value, reason) in ADDED.items():
        if name not in flat and _problem(name, value) is None:
            flat[name] = value
            comments[name] = reason
            rows.append(_row("", "", Outcome(Status.ADDED, {name: value}, reason)))
    rows += [Row(f"line {n.line}", n.text, Status.NOT_CARRIED, (), (), n.reason) for n in notes]
    return Translation(rows, _nested(flat), comments)


def _outcome(override: Override, script: Script) -> Outcome:
    if override.mark == "~":
        return Outcome(Status.NOT_CARRIED, {}, "takes a key out of verl's own configuration")
    if override.unknown:
        told = ", ".join(dict.fromkeys(override.unknown))
        return Outcome(Status.NOT_CARRIED, {}, f"only running the script would tell {told}: set it in RUN.toml")
    if override.problem:
        return Outcome(Status.NOT_CARRIED, {}, f"line {override.line}: {override.problem}")
    if override.key.startswith(CRITIC_PREFIX):
        return _critic(override, script)
    if override.key.startswith(f"{ROLLOUT}.engine_kwargs.vllm."):
        name = override.key.removeprefix(f"{ROLLOUT}.engine_kwargs.vllm.")
        return Outcome(Status.CARRIED, {f"engine.extra.{name}": override.value}, "passed to vLLM as it is")
    if override.key.startswith("custom_reward_function.reward_kwargs."):
        name = override.key.removeprefix("custom_reward_function.reward_kwargs.")
        return Outcome(Status.CARRIED, {f"reward.settings.{name}": override.value}, "passed to the scorer")
    if override.key.startswith("data.apply_chat_template_kwargs."):
        return Outcome(Status.CARRIED, {override.key: override.value})
    rule = RULES.get(override.key) or next((RULES[k] for k in _wildcards(override.key) if k in RULES), None)
    if rule is None:
        return _unknown(override.key)
    try:
        return rule(override.value, script)
    except (TypeError, ValueError, AttributeError):
        return Outcome(Status.NOT_CARRIED, {}, f"{override.text!r} is not a value that verl takes here")


def _critic(override: Override, script: Script) -> Outcome:
    """The critic's settings have verl's names, so that most need no rule."""
    if not script.has_critic:
        return Outcome(Status.NOT_CARRIED, {}, "no critic takes part with this algorithm.adv_estimator")
    name = "critic.optim.lr_scheduler_type" if override.key == "critic.optim.warmup_style" else override.key
    if name in _fields():
        hub = "a name on the Hub; nothing is downloaded" if is_hub_name(name, override.value) else ""
        return Outcome(Status.CHANGED if hub else Status.CARRIED, {name: override.value}, hub)
    if ".fsdp_config." in name:
        return Outcome(Status.NOT_CARRIED, {}, "the critic is sharded and offloaded as the policy is: deepspeed.*")
    if any(word in name for word in ("micro_batch_size", "token_len", "dynamic_bsz", "remove_padding", "mini_batch")):
        return Outcome(Status.NOT_CARRIED, {}, "the critic trains on the actor's micro-batches")
    shared = name.replace(CRITIC_PREFIX, "actor.", 1)
    reason = (
        f"the critic goes by the actor's: {shared}" if shared in _fields() else "the critic has no such setting here"
    )
    return Outcome(Status.NOT_CARRIED, {}, reason)


def _unknown(key: str) -> Outcome:
    names = [*RULES, *_fields()]
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]}?" if near else ""
    return Outcome(Status.UNKNOWN, {}, f"neither verl nor this project has it{hint}")


def _checked(outcome: Outcome) -> Outcome:
    """Not carried, if a setting does not exist here or does not take the value."""
    for name, value in outcome.sets.items():
        problem = _problem(name, value)
        if problem is not None:
            return Outcome(Status.NOT_CARRIED, {}, problem)
    return outcome


def _problem(name: str, value: Any) -> str | None:
    fields = _fields()
    if name not in fields:
        # A table that holds anything, such as engine.extra, is a field itself.
        return None if name.rpartition(".")[0] in fields else f"this version has no setting {name}"
    section, field = fields[name]
    try:
        section.model_validate({field: value})
    except ValidationError as error:
        # Rules that tie fields together are for the whole file, which is checked when it is written.
        own = [item["msg"] for item in error.errors() if item["loc"][:1] == (field,)]
        if own:
            said = own[0].removeprefix("Value error, ")
            return f"{name} does not take {value!r}: {said[:1].lower()}{said[1:]}"
    return None


@functools.cache
def _fields() -> Mapping[str, tuple[type[BaseModel], str]]:
    """The section and the field of every setting, by dotted name."""
    return dict(_section_fields(RunSettings, ""))


def _section_fields(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, tuple[type[BaseModel], str]]]:
    for name, info in model.model_fields.items():
        section = _section(info.annotation)
        if section is None:
            yield f"{prefix}{name}", (model, name)
        else:
            yield from _section_fields(section, f"{prefix}{name}.")


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section that an annotation is, also where it may be None."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)


def _missing_defaults(script: Script) -> dict[str, Any]:
    missing = {key: value for key, value in VERL_DEFAULTS.items() if not script.has(key)}
    if script.value("trainer.total_training_steps") is not None:
        missing.pop("trainer.total_epochs", None)
    if not any(script.has(f"{ACTOR}.ppo_micro_batch_size{suffix}") for suffix in ("", "_per_gpu")):
        missing.pop(f"{ACTOR}.use_dynamic_bsz", None)
    val_samples = script.value(f"{ROLLOUT}.val_kwargs.n", 1)
    if isinstance(val_samples, int) and val_samples > 1:
        missing.pop(f"{ROLLOUT}.val_kwargs.do_sample", None)
    batch_size = script.value("data.train_batch_size", 1024)
    if isinstance(batch_size, int) and batch_size % 256:
        missing.pop(f"{ACTOR}.ppo_mini_batch_size", None)
    return missing


def _wildcards(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join([*parts[:length], "*"]) for length in range(len(parts) - 1, 0, -1)]


def _row(key: str, text: str, outcome: Outcome) -> Row:
    return Row(key, text, outcome.status, tuple(outcome.sets), tuple(outcome.sets.values()), outcome.reason)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """By section, in the order of the settings."""
    order = {setting.name: place for place, setting in enumerate(iter_fields())}
    nested: dict[str, Any] = {}
    for name in sorted(flat, key=lambda n: order.get(n, order.get(n.rpartition(".")[0], len(order)))):
        *path, last = name.split(".")
        table = nested
        for part in path:
            table = table.setdefault(part, {})
        table[last] = flat[name]
    return nested
