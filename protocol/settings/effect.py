"""Settings that are given and change nothing, because another one switches off what they belong to.

Always true: only what a user gave counts, never a default or what a preset filled in; each rule is one sentence that
names the settings without effect and what would give them one, or an effect that never comes in full. A file that gives
all settings of a section, such as a printed one, means none of its defaults.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel

from protocol.settings.algorithm import AlgorithmSettings, Correction
from protocol.settings.data import Truncation
from protocol.settings.presets import PRESETS
from protocol.settings.trainer_rules import warmup_notes

if TYPE_CHECKING:
    from protocol.settings.run import RunSettings

Test = Callable[["RunSettings"], bool]

# A default that is given as it is says nothing if it is nothing, "off", a factor of one, or (of prompts) cuts nothing.
NEUTRAL: tuple[Any, ...] = (None, 0, 1, -1, Truncation.ERROR)


@dataclass(frozen=True, slots=True)
class Rule:
    """`names`, of `section`, matter only where `matters`; `needs` is what a user sets to make it so."""

    section: str
    names: tuple[str, ...]
    needs: str
    matters: Test


def _rule(section: str, names: str, needs: str, matters: Test) -> Rule:
    return Rule(section, tuple(names.split()), needs, matters)


def _weighs(settings: "RunSettings") -> bool:
    """Whether the loss is multiplied by importance weights."""
    correction = settings.algorithm.correction
    by_weight = correction is Correction.BEHAVIOUR and settings.actor.policy_loss == "reinforce"
    return correction is Correction.DECOUPLED or by_weight


def needs_reference(settings: "RunSettings") -> bool:
    """Whether a KL to a reference policy takes part, in the loss or in the reward."""
    in_loss = settings.actor.use_kl_loss and settings.actor.kl_loss_coef > 0
    return in_loss or (settings.algorithm.use_kl_in_reward and settings.algorithm.kl_ctrl.kl_coef > 0)


def _has_own_reference(settings: "RunSettings") -> bool:
    """Whether the reference is a copy of its own, not the policy with its adapters off."""
    return needs_reference(settings) and (not settings.model.lora_rank or settings.ref.path is not None)


RULES: tuple[Rule, ...] = (
    _rule("algorithm", "gamma", "adv_estimator = 'gae' or 'reinforce_plus_plus'",
          lambda s: s.algorithm.adv_estimator in ("gae", "reinforce_plus_plus")),
    _rule("algorithm", "lam", "adv_estimator = 'gae'", lambda s: s.algorithm.adv_estimator == "gae"),
    _rule("algorithm", "norm_adv_by_std_in_grpo", "adv_estimator = 'grpo'",
          lambda s: s.algorithm.adv_estimator == "grpo"),
    _rule("algorithm", "kl_penalty", "use_kl_in_reward = true", lambda s: s.algorithm.use_kl_in_reward),
    _rule("algorithm.kl_ctrl", "type kl_coef", "algorithm.use_kl_in_reward = true",
          lambda s: s.algorithm.use_kl_in_reward),
    _rule("algorithm.kl_ctrl", "horizon target_kl", "algorithm.use_kl_in_reward = true and type = 'adaptive'",
          lambda s: s.algorithm.use_kl_in_reward and s.algorithm.kl_ctrl.type == "adaptive"),
    _rule("algorithm", "use_kl_in_reward", "kl_ctrl.kl_coef above 0",
          lambda s: not s.algorithm.use_kl_in_reward or s.algorithm.kl_ctrl.kl_coef > 0),
    _rule("algorithm", "overlong_penalty_factor", "overlong_buffer_len above 0",
          lambda s: s.algorithm.overlong_buffer_len > 0),
    _rule("algorithm", "correction_cap", "correction = 'decoupled' and no correction_band",
          lambda s: _weighs(s) and s.algorithm.correction_band is None),
    _rule("algorithm", "correction_level correction_geometric correction_band", "correction = 'decoupled'", _weighs),
    _rule("algorithm", "rejection_level rejection_upper", "rejection = 'k1', 'k2' or 'k3'",
          lambda s: s.algorithm.rejection != "none"),
    _rule("algorithm", "rejection_lower", "rejection = 'k1'", lambda s: s.algorithm.rejection == "k1"),
    _rule("algorithm", "rejection_reduce", "a rejection with rejection_level = 'sequence' or 'version_run'",
          lambda s: s.algorithm.rejection != "none" and s.algorithm.rejection_level != "token"),
    _rule("actor", "clip_ratio_low clip_ratio_high", "policy_loss = 'ppo_clip', 'gspo' or 'cispo'",
          lambda s: s.actor.policy_loss != "reinforce"),
    _rule("actor", "clip_ratio_c", "policy_loss = 'ppo_clip'", lambda s: s.actor.policy_loss == "ppo_clip"),
    _rule("actor", "loss_scale_factor", "loss_agg_mode = 'seq-mean-token-sum-norm'",
          lambda s: s.actor.loss_agg_mode == "seq-mean-token-sum-norm"),
    _rule("actor", "kl_loss_coef kl_loss_type", "use_kl_loss = true", lambda s: s.actor.use_kl_loss),
    _rule("actor", "use_kl_loss", "kl_loss_coef above 0",
          lambda s: not s.actor.use_kl_loss or s.actor.kl_loss_coef > 0),
    _rule("actor", "ppo_max_token_len_per_gpu", "use_dynamic_bsz = true", lambda s: s.actor.use_dynamic_bsz),
    _rule("ref", "path", "actor.use_kl_loss = true, or algorithm.use_kl_in_reward = true", needs_reference),
    _rule("ref", "param_offload", "a reference policy of its own: a KL, and ref.path where adapters are trained",
          _has_own_reference),
    _rule("trainer", "total_epochs", "trainer.total_training_steps to be left out",
          lambda s: s.trainer.total_training_steps is None),
    _rule("trainer", "test_freq", "at least as many steps (trainer.total_training_steps)",
          lambda s: s.trainer.test_freq <= (s.trainer.total_training_steps or s.trainer.test_freq)),
    _rule("rollout", "autotune_min_ratio autotune_max_ratio autotune_max_off_policy_share autotune_min_ess",
          "autotune = 'shadow' or 'on'", lambda s: s.rollout.autotune != "off"),
    _rule("rollout", "allow_epoch_lag", "samples_ratio above 1", lambda s: s.rollout.samples_ratio > 1),
    _rule("buffer", "max_pool_bytes", "rollout.samples_ratio above 1", lambda s: s.rollout.samples_ratio > 1),
    _rule("buffer", "password username cluster", "buffer.url of a Redis of your own",
          lambda s: s.buffer.url != "embedded"),
    _rule("buffer.sentinel", "master password username", "buffer.sentinel.nodes",
          lambda s: bool(s.buffer.sentinel.nodes)),
    _rule("engine.simulated", "median_tokens sigma step_base_s step_per_sequence_s prefill_per_token_s install_s",
          "engine.backend = 'simulated'", lambda s: s.engine.backend == "simulated"),
    _rule("evaluation", "temperature", "do_sample = true", lambda s: s.evaluation.do_sample),
    _rule("evaluation", "top_p top_k", "do_sample = true and temperature above 0", lambda s: not s.evaluation.greedy),
    _rule("evaluation", "answer_pattern", "n above 1: it is for maj@k", lambda s: s.evaluation.n > 1),
    _rule("data", "num_train_prompts", "reasoning_gym or a source: files have as many prompts as they have",
          lambda s: not s.data.train_files),
    _rule("data", "prompt_key", "train_files or val_files",
          lambda s: bool(s.data.train_files or s.data.val_files or s.data.source)),
    _rule("data", "truncation", "filter_overlong_prompts = false: what is too long is left out",
          lambda s: not s.data.filter_overlong_prompts),
    _rule("trace", "max_file_bytes max_files", "trace.enabled = true", lambda s: s.trace.enabled),
)  # fmt: skip


def settings_without_effect(settings: "RunSettings") -> list[str]:
    """One sentence for each rule that settings which were given fall under; empty if all have their effect."""
    without = [sentence for rule in RULES if not rule.matters(settings) for sentence in _sentences(rule, settings)]
    return without + warmup_notes(settings, settings.trainer.total_training_steps)


def _sentences(rule: Rule, settings: "RunSettings") -> Iterator[str]:
    section = _section(rule.section, settings)
    given = [f"{rule.section}.{name}" for name in rule.names if section is not None and _is_given(section, name)]
    if given:
        has = "has" if len(given) == 1 else "have"
        yield f"{' and '.join(given)} {has} no effect: {'it needs' if len(given) == 1 else 'they need'} {rule.needs}"


def _section(dotted: str, settings: "RunSettings") -> BaseModel | None:
    """The section, None if the user left it out."""
    section: BaseModel = settings
    for name in dotted.split("."):
        if name not in section.model_fields_set:
            return None
        section = cast(BaseModel, getattr(section, name))
    return section


def _is_given(section: BaseModel, name: str) -> bool:
    if name not in section.model_fields_set:
        return False
    value, default = getattr(section, name), _default(section, name)
    if isinstance(section, AlgorithmSettings) and section.preset is not None:
        filled_in = PRESETS[section.preset].fields
        if name in filled_in and filled_in[name] == value:
            return False
    return value != default or (default not in NEUTRAL and not _is_printed(section))


def _is_printed(section: BaseModel) -> bool:
    """Whether every field that has a default is given."""
    names = {name for name in type(section).model_fields if _default(section, name) is not None}
    return names <= section.model_fields_set


def _default(section: BaseModel, name: str) -> Any:
    field = type(section).model_fields[name]
    return field.get_default(call_default_factory=True, validated_data={})
