"""What every source of prompts comes down to: rows, before the tokenizer sees them."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from protocol.errors import DataError
from protocol.samples import Json

Message = dict[str, str]
GSM8K_SOURCE = "openai/gsm8k"
GSM8K_MARKER = "####"
LABEL_COLUMNS = ("reward_model.ground_truth", "ground_truth")
MESSAGE_KEYS = ("role", "content")


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt as its source has it. `origin` names it to people; `prompt_id` only where the source gives one."""

    prompt: str | list[Message]
    ground_truth: Json
    data_source: str
    origin: str
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    prompt_id: str | None = None


def read_record(record: Mapping[str, Any], origin: str, stem: str, prompt_key: str, needs_label: bool) -> Row:
    """The row of one record of a file, with verl's columns or in GSM8K's own format.

    Raises DataError naming the row, what is missing, and the columns there are.
    """
    if is_gsm8k(record, prompt_key):
        return _read_gsm8k(record, origin)
    if prompt_key not in record:
        raise DataError(
            f"{origin} has no column {prompt_key!r}, only {', '.join(record) or 'none'}; set data.prompt_key to the "
            "column of the prompt"
        )
    label = _find_label(record)
    if needs_label:
        _check_label(label, record, origin)
    source = record.get("data_source")
    return Row(
        prompt=read_prompt(record[prompt_key], origin),
        ground_truth=as_json(label, origin),
        data_source=encodable(str(source) if source else stem, origin),
        origin=origin,
        extra=read_extra(record.get("extra_info"), origin),
    )


def is_gsm8k(record: Mapping[str, Any], prompt_key: str) -> bool:
    """Whether a record has GSM8K's own columns."""
    return (
        prompt_key not in record and isinstance(record.get("question"), str) and isinstance(record.get("answer"), str)
    )


def read_prompt(value: Any, origin: str) -> str | list[Message]:
    """A string, or a list of chat messages with `role` and `content`."""
    if isinstance(value, str):
        if not value:
            raise DataError(f"{origin}: the prompt is empty; remove the row")
        return encodable(value, origin)
    if not isinstance(value, list) or not value:
        raise DataError(f"{origin}: the prompt is {kind_of(value)}; it must be text or a list of messages")
    return [_read_message(message, origin) for message in cast(list[Any], value)]


def kind_of(value: Any) -> str:
    """What a value is, in JSON's words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    for kind, words in ((str, "text"), (int | float, "a number"), (Mapping, "an object")):
        if isinstance(value, kind):
            return words
    return f"a {type(value).__name__}"


def encodable(text: str, origin: str) -> str:
    """`text`, unless UTF-8 can't hold it. Raises DataError naming the row."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{origin}: the text holds half a surrogate pair at {error.start}; mend the text") from error
    return text


def read_extra(value: Any, origin: str) -> dict[str, Any]:
    """Further information for the scorer: an object, or nothing."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{origin}: extra_info is {kind_of(value)}; it must be an object")
    return cast(dict[str, Any], as_json(dict(cast(Mapping[str, Any], value)), origin))


def as_json(value: Any, origin: str) -> Json:
    """`value` if it is JSON, numpy's and Parquet's numbers made plain."""
    try:
        text = json.dumps(value, default=_plain_number, ensure_ascii=False)
        text.encode()
        return json.loads(text)
    except UnicodeEncodeError as error:
        raise DataError(f"{origin}: a label or its extra_info holds half a surrogate pair; mend the text") from error
    except (TypeError, ValueError) as error:
        raise DataError(f"{origin}: a label or its extra_info can't be written as JSON ({error})") from error


def _plain_number(value: Any) -> Any:
    for method in ("tolist", "isoformat", "as_integer_ratio"):  # numpy; dates; decimals
        if hasattr(value, method):
            return float(value) if method == "as_integer_ratio" else getattr(value, method)()
    raise TypeError(f"a {type(value).__name__}")


def _read_message(message: Any, origin: str) -> Message:
    if not isinstance(message, Mapping) or any(not isinstance(message.get(key), str) for key in MESSAGE_KEYS):
        raise DataError(f"{origin}: a chat message must have 'role' and 'content' as text, found {str(message)[:80]}")
    return {key: encodable(message[key], origin) for key in MESSAGE_KEYS}


def _find_label(record: Mapping[str, Any]) -> Any:
    model = record.get("reward_model")
    if isinstance(model, Mapping) and model.get("ground_truth") is not None:
        return model["ground_truth"]
    return record.get("ground_truth")


def _check_label(label: Any, record: Mapping[str, Any], origin: str) -> None:
    """Raise DataError for what stands where a right answer is missing."""
    if label is None:
        named = "reward_model" in record or "ground_truth" in record
        has = f"null as its {' or '.join(LABEL_COLUMNS)}" if named else f"no {' or '.join(LABEL_COLUMNS)}"
        only = "" if named else f", only {', '.join(record)}"
        raise DataError(f"{origin} has {has}{only}; the scorer needs the right answer")
    is_nan = isinstance(label, float) and math.isnan(label)
    if is_nan or (isinstance(label, str) and not label.strip()):
        words = "NaN" if is_nan else "empty"
        raise DataError(f"{origin}: the right answer is {words}; fill it in, or remove the row")


def read_gsm8k_answer(answer: str, origin: str) -> str:
    """The number behind the last `####` of a solution. Raises DataError naming the row."""
    _, marker, label = answer.rpartition(GSM8K_MARKER)
    label = label.strip().replace(",", "")
    if not marker or not label:
        raise DataError(
            f"{origin} looks like GSM8K (question, answer), but its answer has no '{GSM8K_MARKER} NUMBER'; mend the "
            "row, or name the columns as prompt and ground_truth"
        )
    return label


def _read_gsm8k(record: Mapping[str, Any], origin: str) -> Row:
    label = read_gsm8k_answer(record["answer"], origin)
    return Row(read_prompt(record["question"], origin), label, GSM8K_SOURCE, origin)
