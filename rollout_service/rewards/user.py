"""A user's own scorer: `module:function`, called the way verl calls `compute_score`, or with the whole task."""

import inspect
from collections.abc import Callable
from typing import Any

from protocol.errors import DataError
from protocol.samples import Json
from rollout_service.prompts.imports import import_function
from rollout_service.rewards.interface import ScoringTask
from rollout_service.rewards.scorer import LoadedScorer

SOLUTION = "solution_str"
VERL_NAMES = ("data_source", SOLUTION, "ground_truth", "extra_info")


def load_user_scorer(spec: str, settings: dict[str, Any]) -> LoadedScorer:
    """Import the function and see how it wants to be called. Raises DataError with what to do."""
    function = import_function(spec, "reward.name")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"reward.name = {spec!r}: its parameters can't be read ({error}); wrap it in a function"
        ) from error
    call = _by_name(function, signature) if _takes(signature, SOLUTION) else _by_task(function)
    _check_call(spec, signature, settings)

    def score(task: ScoringTask) -> Any:
        return call(task, settings)

    return LoadedScorer(score, _accept_any_label)


def extra_info(task: ScoringTask) -> dict[str, Any]:
    """The prompt's own `extra_info`, and what is known of the response."""
    known = {
        "prompt": task.prompt,
        "sample_id": task.sample_id,
        "finish_reason": str(task.finish_reason),
        "num_tokens": task.num_tokens,
    }
    return {**known, **task.extra}


def _by_name(
    function: Callable[..., Any], signature: inspect.Signature
) -> Callable[[ScoringTask, dict[str, Any]], Any]:
    names = [name for name in VERL_NAMES if _takes(signature, name)]

    def call(task: ScoringTask, settings: dict[str, Any]) -> Any:
        values = (task.data_source, task.response, task.ground_truth, extra_info(task))
        arguments: dict[str, Any] = dict(zip(VERL_NAMES, values, strict=True))
        return function(**{name: arguments[name] for name in names}, **settings)

    return call


def _by_task(function: Callable[..., Any]) -> Callable[[ScoringTask, dict[str, Any]], Any]:
    def call(task: ScoringTask, settings: dict[str, Any]) -> Any:
        return function(task, **settings)

    return call


def _check_call(spec: str, signature: inspect.Signature, settings: dict[str, Any]) -> None:
    """Raise DataError now if a call with these settings could only fail."""
    try:
        if _takes(signature, SOLUTION):
            signature.bind(**{name: None for name in VERL_NAMES if _takes(signature, name)}, **settings)
        else:
            signature.bind(None, **settings)
    except TypeError as error:
        raise DataError(
            f"reward.name = {spec!r} can't be called ({error}); it must take {', '.join(VERL_NAMES)} by name, or the "
            "task alone, and every key of reward.settings"
        ) from error


def _takes(signature: inspect.Signature, name: str) -> bool:
    """Whether the function can be given `name` as a keyword argument."""
    parameter = signature.parameters.get(name)
    if parameter is None:
        return any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def _accept_any_label(label: Json, data_source: str) -> None:
    """What a user's scorer can read is the user's to know."""
