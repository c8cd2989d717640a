"""The math-verify scorer: the answer is right if it is mathematically equal to the label.

math-verify ends what takes too long by an alarm and then says "not equal", which would be a silent zero. Its alarms
are therefore off, and the time-out of the worker holds for it as for every scorer.
"""

import importlib
import logging
import math
from functools import lru_cache
from typing import Any

from protocol.errors import DataError
from protocol.samples import Json
from rollout_service.rewards.interface import ScoringTask
from rollout_service.rewards.scorer import LabelError


def score_math_verify(task: ScoringTask, *, strict: bool = True, float_rounding: int = 6) -> float:
    """1 if what math-verify reads from the response equals the label.

    `strict` and `float_rounding` are math-verify's own.
    """
    from math_verify import verify

    gold = read_gold(task.ground_truth)
    answer = _parse(task.response)
    if not answer:
        return 0.0
    return float(verify(gold, answer, strict=strict, float_rounding=float_rounding, timeout_seconds=None))


def check_math_verify(label: Json, data_source: str) -> None:
    """Raise `LabelError` for a label that math-verify can't read."""
    read_gold(label)


def read_gold(label: Json) -> list[Any]:
    """The label as math-verify reads it; bare LaTeX such as `x+1` needs no dollar signs."""
    if isinstance(label, bool) or not isinstance(label, str | int | float) or not str(label).strip():
        raise LabelError("it must be a string with an expression, or a number")
    if isinstance(label, float) and not math.isfinite(label):
        raise LabelError("it is no finite number, as where one is missing")
    text = str(label)
    marked = "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text
    gold = _parse_label(text if marked else f"\\boxed{{{text}}}")
    if not gold:
        raise LabelError("math-verify reads no expression in it")
    return gold


@lru_cache(maxsize=1024)
def _parse_label(text: str) -> list[Any]:
    return _parse(text)


def prepare_math_verify(data_source: str) -> None:
    """Import math-verify. Raises DataError if it isn't there."""
    try:
        importlib.import_module("math_verify")
    except ImportError as error:
        raise DataError(f"math-verify can't be imported ({error}); install april-rollout[service]") from error


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its alarms are off
    return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]  # declared int, None is documented
