"""The reasoning-gym scorer: each generator judges the answers to its own questions."""

from typing import Any

from protocol.errors import DataError
from protocol.samples import Json
from rollout_service.rewards.extract import extract_answer
from rollout_service.rewards.gym_library import DATA_SOURCE_PREFIX, generator_names, scoring_generator
from rollout_service.rewards.interface import ScoringTask
from rollout_service.rewards.plain import from_plain
from rollout_service.rewards.scorer import LabelError

ENTRY_KEYS = ("question", "answer", "metadata")


def score_reasoning_gym(task: ScoringTask, *, pattern: str | None = None) -> float:
    """What the generator's `score_answer` says of the extracted answer; many generators give partial credit."""
    name, entry, settings = read_label(task.ground_truth, task.data_source)
    answer = extract_answer(task.response, pattern)
    return scoring_generator(name, settings).score_answer(answer, entry)


def check_reasoning_gym(label: Json, data_source: str) -> None:
    """Raise `LabelError` for a label that isn't an entry of the generator that the data source names."""
    name, _, settings = read_label(label, data_source)
    try:
        scoring_generator(name, settings)
    except DataError as error:
        raise LabelError(str(error)) from error


def prepare_reasoning_gym(data_source: str) -> None:
    """Import reasoning-gym. Raises DataError if it isn't there."""
    generator_names()


def read_label(label: Json, data_source: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Generator, entry and the generator's settings."""
    name = data_source.removeprefix(DATA_SOURCE_PREFIX)
    if not data_source.startswith(DATA_SOURCE_PREFIX) or not name:
        raise LabelError(f"its data_source must be {DATA_SOURCE_PREFIX}GENERATOR, not {data_source!r}")
    if not isinstance(label, dict) or any(key not in label for key in ENTRY_KEYS):
        raise LabelError(f"it must be a reasoning-gym entry with {', '.join(ENTRY_KEYS)}")
    entry = from_plain({key: label[key] for key in ENTRY_KEYS})
    return name, entry, from_plain(label.get("settings") or {})
