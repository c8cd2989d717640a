"""All prompts of a run, from the source that its settings name.

Always true: ids are unique over training and validation, and a function of the data alone (filtering by length, the
seed and the order of an epoch don't move them).
"""

import logging
from collections import Counter
from collections.abc import Sequence

from protocol.errors import DataError
from protocol.samples import Prompt
from protocol.settings import RunSettings
from rollout_service.prompts.encode import EncodedRow, encode_rows, load_tokenizer
from rollout_service.prompts.files import read_files
from rollout_service.prompts.generators import generate_rows
from rollout_service.prompts.interface import PromptSet
from rollout_service.prompts.rows import Row
from rollout_service.prompts.user_source import call_source

VALIDATION_PREFIX = "val/"  # the same file may be trained on and validated on; its prompts stay apart

logger = logging.getLogger(__name__)


def load_prompts(settings: RunSettings) -> PromptSet:
    """Prompts of `settings.data`, tokenized. Blocks for seconds. Raises DataError in one sentence that says what to do.

    Of the validation prompts the first `data.num_val_prompts` are kept.
    """
    tokenizer = load_tokenizer(settings)
    train_rows, validation_rows = _read_rows(settings)
    if not train_rows:
        raise DataError("there are no training prompts; set data.train_files, data.reasoning_gym or data.source")
    train, num_filtered = encode_rows(train_rows, tokenizer, settings.data)
    validation, num_filtered_validation = encode_rows(validation_rows, tokenizer, settings.data)
    if num_filtered == len(train):
        raise DataError(
            f"all {num_filtered} training prompts are longer than data.max_prompt_length = "
            f"{settings.data.max_prompt_length} tokens; raise it"
        )
    if num_filtered or num_filtered_validation:
        logger.warning(
            "left out %d training and %d validation prompts longer than %d tokens",
            num_filtered,
            num_filtered_validation,
            settings.data.max_prompt_length,
        )
    prompts = PromptSet(
        train=_name(train, train_rows, ""),
        validation=_name(validation, validation_rows, VALIDATION_PREFIX)[: settings.data.num_val_prompts],
        num_filtered=num_filtered + num_filtered_validation,
    )
    _check_ids(prompts)
    return prompts


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


def _name(encoded: Sequence[EncodedRow | None], rows: Sequence[Row], prefix: str) -> tuple[Prompt, ...]:
    """Prompts of the rows that were kept; every row has been numbered within its data source."""
    numbers: Counter[str] = Counter()
    prompts: list[Prompt] = []
    for row, item in zip(rows, encoded, strict=True):
        number = numbers[row.data_source]
        numbers[row.data_source] += 1
        if item is None:
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
