"""Scorers that need nothing but the text: exact match, and GSM8K's number after `####`."""

import math
import re
import unicodedata
from decimal import Decimal

from protocol.samples import Json
from rollout_service.rewards.extract import extract_answer
from rollout_service.rewards.interface import ScoringTask
from rollout_service.rewards.scorer import LabelError

GSM8K_MARKER = "####"
# A minus counts as a sign only where it is not a subtraction; commas only where they separate thousands.
NUMBER = re.compile(
    r"(?P<sign>(?<![\w)])-\s?)?\$?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


def score_exact_match(task: ScoringTask, *, pattern: str | None = None, ignore_case: bool = True) -> float:
    """1 if the answer equals the label, or one of a list of labels, after normalisation."""
    answer = normalise(extract_answer(task.response, pattern), ignore_case)
    return float(any(answer == normalise(label, ignore_case) for label in accepted_labels(task.ground_truth)))


def check_exact_match(label: Json, data_source: str) -> None:
    """Raise `LabelError` for a label that no answer can equal."""
    accepted_labels(label)


def accepted_labels(label: Json) -> list[str]:
    """Labels that count as right, as text."""
    labels = label if isinstance(label, list) else [label]
    if not labels or any(isinstance(item, bool) or not isinstance(item, str | int | float) for item in labels):
        raise LabelError("it must be a string, a number, or a list of them")
    texts = [str(item) for item in labels]
    if any(isinstance(item, float) and not math.isfinite(item) for item in labels):
        raise LabelError("it is no finite number, as where one is missing")
    if not all(normalise(text) for text in texts):
        raise LabelError("it is empty, or a full stop alone, which is not compared")
    return texts


def normalise(text: str, ignore_case: bool = True) -> str:
    """One form of what reads the same: NFKC, single spaces, no closing full stop, and by default no case."""
    text = " ".join(unicodedata.normalize("NFKC", text).split()).removesuffix(".").rstrip()
    return text.casefold() if ignore_case else text


def score_gsm8k(task: ScoringTask, *, only_marked: bool = False) -> float:
    """1 if the number after the last `####`, else the last number of the response, equals the label.

    `only_marked`: a response without `####` is wrong.
    """
    before, marker, after = task.response.rpartition(GSM8K_MARKER)
    if marker:
        answer = next(iter(find_numbers(after)), None)
    else:
        answer = None if only_marked else next(reversed(find_numbers(after or before)), None)
    return float(answer is not None and answer == read_number(task.ground_truth))


def check_gsm8k(label: Json, data_source: str) -> None:
    """Raise `LabelError` for a label that is not one number."""
    read_number(label)


def find_numbers(text: str) -> list[Decimal]:
    """Numbers in `text`, in order."""
    found: list[Decimal] = []
    for match in NUMBER.finditer(text):
        size = Decimal(match["digits"].replace(",", ""))
        found.append(-size if match["sign"] else size)
    return found


def read_number(label: Json) -> Decimal:
    """The number that a label is; a label with GSM8K's whole solution counts by what follows `####`."""
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise LabelError("it must be a number, or a string with one")
    text = str(label)
    numbers = find_numbers(text.rpartition(GSM8K_MARKER)[2])
    if len(numbers) != 1:
        raise LabelError(f"it must be one number, found {len(numbers)}")
    return numbers[0]
