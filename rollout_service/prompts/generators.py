"""Rows made by reasoning-gym generators.

Always true: the rows are a function of the settings and `run.seed`; training and held-out questions are made from
seeds that never meet, and a held-out question that also occurs in training is replaced as long as others are found.
"""

import hashlib
import logging
import random
from collections.abc import Iterator, Sequence
from typing import Any

from protocol.errors import DataError
from protocol.settings.data import ReasoningGymTask
from rollout_service.prompts.apportion import apportion
from rollout_service.prompts.rows import Row
from rollout_service.rewards.gym_library import DATA_SOURCE_PREFIX, make_generator
from rollout_service.rewards.plain import to_plain

HELD_OUT_OFFSET = 1 << 30  # a generator's i-th entry has seed base + i: bases below and offsets above never meet
MAX_TRIES = 4  # held-out questions that are looked at for each one that is needed
RESERVED_SETTINGS = ("seed", "size")

logger = logging.getLogger(__name__)


def generate_rows(
    tasks: Sequence[ReasoningGymTask], seed: int, num_train: int, num_held_out: int
) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows of the mixture, interleaved."""
    for task in tasks:
        for name in RESERVED_SETTINGS:
            if name in task.settings:
                raise DataError(
                    f"data.reasoning_gym: leave {name} out of {task.name}'s settings; it follows from the run"
                )
    train = [
        row
        for place, (task, count) in enumerate(zip(tasks, shares(tasks, num_train), strict=True))
        for row in _take(_entries(task, _base_seed(seed, place, task.name), count), count, frozenset())
    ]
    seen = frozenset(str(row.prompt) for row in train)
    held_out = [
        row
        for place, (task, count) in enumerate(zip(tasks, shares(tasks, num_held_out), strict=True))
        for row in _take(
            _entries(task, _base_seed(seed, place, task.name) + HELD_OUT_OFFSET, count * MAX_TRIES), count, seen
        )
    ]
    num_known = sum(str(row.prompt) in seen for row in held_out)
    if num_known:
        logger.warning("%d of %d held-out questions also occur in training", num_known, len(held_out))
    return _interleave(train, seed), _interleave(held_out, seed)


def shares(tasks: Sequence[ReasoningGymTask], count: int) -> list[int]:
    """How many of `count` rows each task gives, by weight; rests go to the largest remainders."""
    return apportion([task.weight for task in tasks], count)


def _take(rows: Iterator[Row], count: int, seen: frozenset[str]) -> list[Row]:
    """`count` rows, those that aren't in `seen` first."""
    new: list[Row] = []
    known: list[Row] = []
    for row in rows:
        if len(new) == count:
            break
        (known if str(row.prompt) in seen else new).append(row)
    return new + known[: count - len(new)]


def _entries(task: ReasoningGymTask, base_seed: int, size: int) -> Iterator[Row]:
    if not size:
        return
    generator = make_generator(task.name, {**task.settings, "seed": base_seed, "size": size})
    for index in range(size):
        origin = f"question {index} of reasoning-gym's {task.name}"
        try:
            entry: dict[str, Any] = generator[index]
            label = to_plain(_label_of(entry, task))
        except Exception as error:
            # A generator fails with whatever its arithmetic raises when its settings leave no question to ask.
            raise DataError(f"{origin} can't be made ({type(error).__name__}: {error}); change its settings") from error
        yield Row(entry["question"], label, DATA_SOURCE_PREFIX + task.name, origin)


def _label_of(entry: dict[str, Any], task: ReasoningGymTask) -> dict[str, Any]:
    """All that the generator's scorer may ask for."""
    label = {"question": entry["question"], "answer": entry["answer"], "metadata": entry["metadata"]}
    return {**label, "settings": task.settings} if task.settings else label


def _base_seed(seed: int, place: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{place}/{name}".encode()).digest()
    return int.from_bytes(digest[:4]) % (HELD_OUT_OFFSET // 2)


def _interleave(rows: list[Row], seed: int) -> list[Row]:
    """One order of the mixture, so that a prefix of it is a mixture too."""
    random.Random(seed).shuffle(rows)  # noqa: S311  # a shuffle, not a secret
    return rows
