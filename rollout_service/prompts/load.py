"""All prompts of a run, from the source that its settings name.

Always true: ids are unique over training and validation, and a function of the data alone (filtering by length, the
seed, weights and the order of an epoch don't move them).
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from protocol.errors import DataError
from protocol.samples import Prompt
from protocol.settings import RunSettings
from rollout_service.prompts.apportion import representative
from rollout_service.prompts.encode import EncodedRow, Fit, check_lengths, encode_rows, load_tokenizer
from rollout_service.prompts.files import read_files
from rollout_service.prompts.generators import generate_rows
from rollout_service.prompts.interface import PromptSet
from rollout_service.prompts.order import check_weights
from rollout_service.prompts.repeats import count_repeats
from rollout_service.prompts.rows import Row
from rollout_service.prompts.user_source import call_source

VALIDATION_PREFIX = "val/"  # the same file may be trained on and validated on; its prompts stay apart

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadData:
    """Everything that was read, whatever became of it, and the tokenizer that it was encoded with."""

    train: list[EncodedRow]
    validation: list[EncodedRow]
    tokenizer: Any


def load_prompts(settings: RunSettings) -> PromptSet:
    """Prompts of `settings.data`, tokenized. Blocks for seconds. Raises DataError in one sentence that says what to do.

    Of the validation prompts `data.num_val_prompts` are kept, each data source by its share.
    """
    prompts = make_prompts(read_data(settings), settings)
    _warn(prompts, settings)
    return prompts


def read_data(settings: RunSettings) -> ReadData:
    """Read and encode all rows. Raises DataError for a row that can't be read or rendered, not for its length."""
    tokenizer = load_tokenizer(settings)
    train_rows, validation_rows = _read_rows(settings)
    if not train_rows:
        raise DataError("there are no training prompts; set data.train_files, data.reasoning_gym or data.source")
    return ReadData(
        encode_rows(train_rows, tokenizer, settings.data),
        encode_rows(validation_rows, tokenizer, settings.data),
        tokenizer,
    )


def make_prompts(read: ReadData, settings: RunSettings) -> PromptSet:
    """The prompts that are served. Raises DataError if none are left, or if the settings don't fit them."""
    data = settings.data
    for what, encoded in (("training", read.train), ("validation", read.validation)):
        check_lengths(encoded, data.max_prompt_length)
        _check_some_left(what, encoded, data.max_prompt_length)
    everything = [*read.train, *read.validation]
    prompts = PromptSet(
        train=_name(read.train, ""),
        validation=representative(_name(read.validation, VALIDATION_PREFIX), data.num_val_prompts),
        num_filtered=sum(item.fit is Fit.FILTERED for item in everything),
        num_truncated=sum(item.fit is Fit.TRUNCATED for item in everything),
    )
    _check_ids(prompts)
    if data.source_weights:
        check_weights(prompts.train, data.source_weights)
    return prompts


def _check_some_left(what: str, encoded: Sequence[EncodedRow], limit: int) -> None:
    if encoded and not any(item.kept for item in encoded):
        shortest = min(item.num_tokens for item in encoded)
        raise DataError(
            f"all {len(encoded)} {what} prompts are longer than data.max_prompt_length = {limit} tokens (the shortest "
            f"has {shortest}); raise it"
        )


def _warn(prompts: PromptSet, settings: RunSettings) -> None:
    """Say what is legal and still surprises."""
    limit, repeats = settings.data.max_prompt_length, count_repeats(prompts)
    for count, what in (
        (prompts.num_filtered, f"prompts are left out: they are longer than {limit} tokens"),
        (prompts.num_truncated, f"prompts are cut to {limit} tokens ({settings.data.truncation.value})"),
        (repeats.num_repeated, "training prompts repeat an earlier one"),
        (repeats.num_contradictory, "training prompts repeat an earlier one with another right answer"),
        (repeats.num_held_out, "held-out prompts also occur in training"),
    ):
        if count:
            logger.warning("%d %s", count, what)


def _read_rows(settings: RunSettings) -> tuple[list[Row], list[Row]]:
    """(train, validation) rows of the one source that is set."""
    data = settings.data
    if data.reasoning_gym:
        train, held_out = generate_rows(
            data.reasoning_gym, settings.run.seed, data.num_train_prompts, data.num_val_prompts
        )
    elif data.source is not None:
        train, held_out = call_source(data.source, settings)
    else:
        train, held_out = read_files(data.train_files, data.prompt_key, needs_label(settings)), []
    if data.val_files:
        held_out = read_files(data.val_files, data.prompt_key, needs_label(settings))
    return train, held_out


def needs_label(settings: RunSettings) -> bool:
    """Whether a row without a right answer is of no use: all built-in scorers compare with one."""
    return ":" not in settings.reward.name


def _name(encoded: Sequence[EncodedRow], prefix: str) -> tuple[Prompt, ...]:
    """Prompts of the rows that were kept; every row has been numbered within its data source."""
    numbers: Counter[str] = Counter()
    prompts: list[Prompt] = []
    for item in encoded:
        row = item.row
        number = numbers[row.data_source]
        numbers[row.data_source] += 1
        if not item.kept:
            continue
        prompt_id = row.prompt_id or f"{prefix}{row.data_source}:{number}"
        prompts.append(
            Prompt(prompt_id, item.token_ids, item.question, row.data_source, row.ground_truth, dict(row.extra))
        )
    return tuple(prompts)


def _check_ids(prompts: PromptSet) -> None:
    counts = Counter(prompt.prompt_id for prompt in prompts.train + prompts.validation)
    twice = [prompt_id for prompt_id, count in counts.items() if count > 1]
    if twice:
        raise DataError(f"{len(twice)} prompt ids occur more than once, {twice[0]!r} first; give each row its own id")
