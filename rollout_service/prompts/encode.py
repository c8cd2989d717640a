"""From rows to token ids: system prompt, instruction, chat template, and what to do with prompts that are too long."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from protocol.errors import DataError
from protocol.settings import RunSettings
from protocol.settings.data import DataSettings, Truncation
from rollout_service.prompts.rows import Message, Row

CHUNK_SIZE = 1024  # rows that are tokenized in one call: the fast tokenizer works on them in parallel


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """A row with its token ids; `question` is what the user says last."""

    row: Row
    question: str
    token_ids: tuple[int, ...]


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


def encode_rows(rows: Sequence[Row], tokenizer: Any, data: DataSettings) -> tuple[list[EncodedRow | None], int]:
    """Rows with their token ids, None where one was filtered for its length, and how many were."""
    if data.system_prompt is not None and not data.apply_chat_template:
        raise DataError("data.system_prompt needs a chat template; set data.apply_chat_template = true or leave it out")
    encoded: list[EncodedRow | None] = []
    for start in range(0, len(rows), CHUNK_SIZE):
        chunk = rows[start : start + CHUNK_SIZE]
        rendered = [_render(row, tokenizer, data) for row in chunk]
        ids: list[list[int]] = tokenizer([text for text, _ in rendered], add_special_tokens=False)["input_ids"]
        for row, (_, question), token_ids in zip(chunk, rendered, ids, strict=True):
            encoded.append(_fit(row, question, token_ids, data))
    return encoded, sum(item is None for item in encoded)


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
    return _apply_template(row, _with_system(row, messages, data.system_prompt), tokenizer), question


def _apply_template(row: Row, messages: list[Message], tokenizer: Any) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
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


def _fit(row: Row, question: str, ids: list[int], data: DataSettings) -> EncodedRow | None:
    """The row within `max_prompt_length`; None if it is filtered."""
    limit = data.max_prompt_length
    if not ids:
        raise DataError(f"{row.origin}: the prompt has no tokens; remove the row")
    if len(ids) <= limit:
        return EncodedRow(row, question, tuple(ids))
    if data.filter_overlong_prompts:
        return None
    if data.truncation is Truncation.ERROR:
        raise DataError(
            f"{row.origin}: the prompt has {len(ids)} tokens, more than data.max_prompt_length = {limit}; raise it, "
            "set data.filter_overlong_prompts = true, or data.truncation to 'left', 'right' or 'middle'"
        )
    return EncodedRow(row, question, tuple(truncate(ids, limit, data.truncation)))


def truncate(ids: list[int], limit: int, how: Truncation) -> list[int]:
    """`limit` of the ids: the last ones (`left` cuts the beginning), the first ones, or both ends."""
    if how is Truncation.LEFT:
        return ids[-limit:]
    if how is Truncation.RIGHT:
        return ids[:limit]
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]
