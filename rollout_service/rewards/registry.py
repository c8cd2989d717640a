"""Scorers by name: the built-in ones, the choice by data source, and a user's own function."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from protocol.errors import DataError
from protocol.samples import Json
from protocol.states import FinishReason
from rollout_service.rewards.gym import check_reasoning_gym, prepare_reasoning_gym, score_reasoning_gym
from rollout_service.rewards.gym_library import DATA_SOURCE_PREFIX
from rollout_service.rewards.interface import ScoringTask
from rollout_service.rewards.mathematics import check_math_verify, prepare_math_verify, score_math_verify
from rollout_service.rewards.scorer import LabelError, LoadedScorer
from rollout_service.rewards.text import check_exact_match, check_gsm8k, score_exact_match, score_gsm8k
from rollout_service.rewards.user import load_user_scorer

AUTO = "auto"
REQUIRE_STOP = "require_stop"
BUILTIN: Mapping[str, LoadedScorer] = {
    "reasoning_gym": LoadedScorer(score_reasoning_gym, check_reasoning_gym, prepare_reasoning_gym),
    "math_verify": LoadedScorer(score_math_verify, check_math_verify, prepare_math_verify),
    "exact_match": LoadedScorer(score_exact_match, check_exact_match),
    "gsm8k": LoadedScorer(score_gsm8k, check_gsm8k),
}
SCORER_OF_SOURCE: Mapping[str, str] = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math_verify",
    "DigitalLearningGmbH/MATH-lighteval": "math_verify",
    "HuggingFaceH4/MATH-500": "math_verify",
}


def scorer_for(data_source: str) -> str:
    """The built-in scorer that `auto` takes for a data source. Raises LabelError if there is none."""
    if data_source.startswith(DATA_SOURCE_PREFIX):
        return "reasoning_gym"
    if data_source in SCORER_OF_SOURCE:
        return SCORER_OF_SOURCE[data_source]
    names = ", ".join(BUILTIN)
    raise LabelError(
        f"no scorer is known for data source {data_source!r}; set reward.name to {names} or module:function"
    )


def load_scorer(name: str, settings: dict[str, Any]) -> LoadedScorer:
    """The scorer `reward.name` with its `reward.settings`. Raises DataError with what to do."""
    if ":" in name:
        return load_user_scorer(name, settings)
    if name == AUTO:
        return _load_auto(settings)
    if name not in BUILTIN:
        raise DataError(f"reward.name = {name!r} is no scorer; use {AUTO}, {', '.join(BUILTIN)} or module:function")
    _check_settings(name, settings, _parameters(name))
    BUILTIN[name].prepare("")
    return _bind(name, settings)


def _load_auto(settings: dict[str, Any]) -> LoadedScorer:
    """Each built-in scorer with those of the settings that it has."""
    names = {name: _parameters(name) for name in BUILTIN}
    _check_settings(AUTO, settings, sorted(set[str]().union(*names.values())))
    bound = {
        name: _bind(name, {key: value for key, value in settings.items() if key in keys})
        for name, keys in names.items()
    }

    def score(task: ScoringTask) -> Any:
        return bound[scorer_for(task.data_source)].score(task)

    def check_label(label: Json, data_source: str) -> None:
        bound[scorer_for(data_source)].check_label(label, data_source)

    def prepare(data_source: str) -> None:
        bound[scorer_for(data_source)].prepare(data_source)

    return LoadedScorer(score, check_label, prepare)


def _bind(name: str, settings: dict[str, Any]) -> LoadedScorer:
    own = {key: value for key, value in settings.items() if key != REQUIRE_STOP}
    score = partial(BUILTIN[name].score, **own)
    return replace(BUILTIN[name], score=_only_stopped(score) if settings.get(REQUIRE_STOP) else score)


def _only_stopped(score: Callable[[ScoringTask], Any]) -> Callable[[ScoringTask], Any]:
    """A response that was cut off by its length is wrong, whatever it says."""

    def scored(task: ScoringTask) -> Any:
        return score(task) if task.finish_reason is FinishReason.STOP else 0.0

    return scored


def _parameters(name: str) -> list[str]:
    kinds = inspect.signature(BUILTIN[name].score).parameters.values()
    return [REQUIRE_STOP, *(p.name for p in kinds if p.kind is p.KEYWORD_ONLY)]


def _check_settings(name: str, settings: dict[str, Any], known: list[str]) -> None:
    for key in settings:
        if key not in known:
            raise DataError(f"reward.settings.{key} is no setting of scorer {name}; it has {', '.join(known)}")
