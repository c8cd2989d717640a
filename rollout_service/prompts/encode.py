"""From rows to token ids: system prompt, instruction, chat template, and what to do with prompts that are too long."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from protocol.errors import DataError
from protocol.settings import RunSettings
from protocol.settings.data import DataSettings, Truncation
from rollout_service.prompts.rows import Message, Row

CHUNK_SIZE = 1024  # rows that are tokenized in one call: the fast tokenizer works on them in parallel


class Fit(StrEnum):
    """How a prompt met `data.max_prompt_length`."""

    WHOLE = "whole"
    TRUNCATED = "truncated"
    FILTERED = "filtered"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """A row with its token ids, none if it was filtered or refused; `num_tokens` is its length before all that.

    `question` is what the user says last.
    """

    row: Row
    question: str
    token_ids: tuple[int, ...]
    num_tokens: int
    fit: Fit

    @property
    def kept(self) -> bool:
        """Whether it is served."""
        return self.fit in (Fit.WHOLE, Fit.TRUNCATED)


def load_tokenizer(settings: RunSettings) -> Any:
    """The tokenizer of the run, from a folder on this machine. Raises DataError with what to do."""
    folder = settings.model.tokenizer_path or settings.model.path
    if folder is None:
        raise DataError("no tokenizer is named; set model.path, or model.tokenizer_path, to a Hugging Face folder")
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; set model.path, or model.tokenizer_path, to a Hugging Face folder")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # The loader raises whatever its parsers meet: OSError, ValueError, KeyError, or an exception of the Rust side.
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{folder} has no tokenizer that can be loaded ({reason}); save one there or set model.tokenizer_path"
        ) from error
    if settings.data.apply_chat_template and not tokenizer.chat_template:
        raise DataError(f"the tokenizer in {folder} has no chat template; set data.apply_chat_template = false")
    return tokenizer


def encode_rows(rows: Sequence[Row], tokenizer: Any, data: DataSettings) -> list[EncodedRow]:
    """All rows with their token ids, in order. Raises DataError for a row that can't be rendered."""
    if data.system_prompt is not None and not data.apply_chat_template:
        raise DataError("data.system_prompt needs a chat template; set data.apply_chat_template = true or leave it out")
    _check_template_arguments(tokenizer, data)
    encoded: list[EncodedRow] = []
    for start in range(0, len(rows), CHUNK_SIZE):
        chunk = rows[start : start + CHUNK_SIZE]
        rendered = [_render(row, tokenizer, data) for row in chunk]
        ids: list[list[int]] = tokenizer([text for text, _ in rendered], add_special_tokens=False)["input_ids"]
        encoded += [
            _fit(row, question, token_ids, data)
            for row, (_, question), token_ids in zip(chunk, rendered, ids, strict=True)
        ]
    return encoded


def check_lengths(encoded: Sequence[EncodedRow], limit: int) -> None:
    """Raise DataError if a row is too long and the settings don't say what to do about it."""
    refused = [item for item in encoded if item.fit is Fit.REFUSED]
    if not refused:
        return
    longest = max(item.num_tokens for item in refused)
    raise DataError(
        f"{refused[0].row.origin}: the prompt has {refused[0].num_tokens} tokens, more than data.max_prompt_length = "
        f"{limit}; raise it, set data.filter_overlong_prompts = true, or data.truncation to 'left', 'right' or "
        f"'middle' ({len(refused)} of {len(encoded)} prompts are too long, the longest has {longest})"
    )


def _check_template_arguments(tokenizer: Any, data: DataSettings) -> None:
    """A template ignores what it doesn't know, so that a typo would go unseen."""
    template = str(tokenizer.chat_template)
    for name in data.apply_chat_template_kwargs:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise DataError(
                f"data.apply_chat_template_kwargs has {name!r}, which the tokenizer's chat template does not read; "
                "correct the name or leave it out"
            )


def _render(row: Row, tokenizer: Any, data: DataSettings) -> tuple[str, str]:
    """(text to tokenize, question) of a row."""
    if not data.apply_chat_template:
        question = _append(_plain_text(row), data.instruction)
        return question, question
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else list(row.prompt)
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise DataError(f"{row.origin}: none of its messages is the user's; the model would have nothing to answer")
    question = _append(messages[last]["content"], data.instruction)
    messages[last] = {**messages[last], "content": question}
    messages = _with_system(row, messages, data.system_prompt)
    return _apply_template(row, messages, tokenizer, data.apply_chat_template_kwargs), question


def _apply_template(row: Row, messages: list[Message], tokenizer: Any, arguments: dict[str, Any]) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)
    except Exception as error:
        # Templates are programs: they raise TemplateError, UndefinedError or TypeError for roles that they don't know.
        raise DataError(
            f"{row.origin}: the chat template refuses its messages ({error}); change their roles"
        ) from error


def _with_system(row: Row, messages: list[Message], system_prompt: str | None) -> list[Message]:
    if system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise DataError(f"{row.origin} has a system message of its own; leave out data.system_prompt")
    return [{"role": "system", "content": system_prompt}, *messages]


def _plain_text(row: Row) -> str:
    if isinstance(row.prompt, str):
        return row.prompt
    if len(row.prompt) == 1:
        return row.prompt[0]["content"]
    raise DataError(f"{row.origin} has {len(row.prompt)} chat messages; set data.apply_chat_template = true")


def _append(question: str, instruction: str | None) -> str:
    """The instruction behind the question, with a space between them unless it brings its own."""
    if not instruction:
        return question
    return question + instruction if instruction[0].isspace() else f"{question} {instruction}"


def _fit(row: Row, question: str, ids: list[int], data: DataSettings) -> EncodedRow:
    """The row within `max_prompt_length`, if it can be."""
    limit = data.max_prompt_length
    if not ids:
        raise DataError(f"{row.origin}: the prompt has no tokens; remove the row")
    if len(ids) <= limit:
        return EncodedRow(row, question, tuple(ids), len(ids), Fit.WHOLE)
    if data.filter_overlong_prompts:
        return EncodedRow(row, question, (), len(ids), Fit.FILTERED)
    if data.truncation is Truncation.ERROR:
        return EncodedRow(row, question, (), len(ids), Fit.REFUSED)
    return EncodedRow(row, question, tuple(truncate(ids, limit, data.truncation)), len(ids), Fit.TRUNCATED)


def truncate(ids: list[int], limit: int, how: Truncation) -> list[int]:
    """`limit` of the ids: the last ones (`left` cuts the beginning), the first ones, or both ends."""
    if how is Truncation.LEFT:
        return ids[-limit:]
    if how is Truncation.RIGHT:
        return ids[:limit]
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]
