"""A scorer as the worker holds it, and what its result means."""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from protocol.samples import Json, Reward
from protocol.states import FailReason
from rollout_service.rewards.interface import ScoringError, ScoringTask

ScoreFunction = Callable[[ScoringTask], Any]
CheckFunction = Callable[[Json, str], None]
PrepareFunction = Callable[[str], None]


LARGEST_REWARD = 3.4028234663852886e38  # of float32, in which a batch carries rewards


def nothing_to_prepare(data_source: str) -> None:
    """For scorers that are ready when they are imported."""


class LabelError(ValueError):
    """A label that the scorer can't read; the message ends the sentence "the label is of no use: …"."""


@dataclass(frozen=True, slots=True)
class LoadedScorer:
    """`score` gives a number or a mapping with `score`; `check_label` raises `LabelError` (label, data source).

    `prepare` imports what tasks of a data source need, which must not count towards the time of the first of them.
    """

    score: ScoreFunction
    check_label: CheckFunction
    prepare: PrepareFunction = nothing_to_prepare


def to_reward(result: Any) -> Reward:
    """The reward that a scorer's result stands for. Raises ScoringError unless it is a number that float32 can hold.

    A mapping counts by `score`; its other such numbers become the parts, anything else in it is left out.
    """
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    if isinstance(result, Reward):
        return Reward(_finite(result.value), _parts(result.parts))
    if not isinstance(result, Mapping):
        return Reward(_finite(result))
    if "score" not in result:
        raise ScoringError(FailReason.REWARD_NOT_FINITE, "the scorer returned a mapping without 'score'")
    return Reward(_finite(result["score"]), _parts(result))


def _finite(value: Any) -> float:
    number = _as_number(value)
    if number is None or not math.isfinite(number):
        shown = repr(value)[:80] if number is None else f"{number}"
        raise ScoringError(FailReason.REWARD_NOT_FINITE, f"the scorer returned {shown}, which is not a finite number")
    if not _fits(number):
        raise ScoringError(
            FailReason.REWARD_NOT_FINITE,
            f"the scorer returned {number:g}, which is infinite in a batch's float32: give a smaller number",
        )
    return number


def _fits(number: float) -> bool:
    """Whether float32 holds it as a finite number; NaN is none."""
    return abs(number) <= LARGEST_REWARD


def _parts(values: Mapping[Any, Any]) -> dict[str, float]:
    numbers = {str(name): _as_number(value) for name, value in values.items() if name != "score"}
    return {name: number for name, number in numbers.items() if number is not None and _fits(number)}


def _as_number(value: Any) -> float | None:
    """Value as a float: Python's numbers, and scalars of numpy and torch by way of `item`."""
    if isinstance(value, bool | int | float):
        return _to_float(value)
    item = getattr(value, "item", None)
    if not callable(item):
        return None
    try:
        scalar = item()
    except (TypeError, ValueError, RuntimeError):  # an array of more than one number has no item
        return None
    return _to_float(scalar) if isinstance(scalar, bool | int | float) else None


def _to_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
