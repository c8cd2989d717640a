"""Rows from a user's own function."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from protocol.errors import DataError
from protocol.settings import RunSettings
from rollout_service.prompts.imports import import_function
from rollout_service.prompts.rows import Row, as_json, encodable, read_extra, read_prompt

REQUIRED = ("prompt", "ground_truth", "data_source")
OPTIONAL = ("extra", "id")


def call_source(spec: str, settings: RunSettings) -> tuple[list[Row], list[Row]]:
    """Training and validation rows of `data.source`. Raises DataError with what the function did wrong."""
    function = import_function(spec, "data.source")
    try:
        result = function(settings)
    except (Exception, SystemExit) as error:
        # The function is the user's: whatever it raises is the answer to why there are no prompts.
        raise DataError(f"data.source = {spec!r} raised {type(error).__name__}: {error}") from error
    if not isinstance(result, tuple) or len(cast(tuple[Any, ...], result)) != 2:
        raise DataError(
            f"data.source = {spec!r} returned a {type(result).__name__}; it must return (train, validation)"
        )
    train, validation = cast(tuple[Any, Any], result)
    return _read_rows(train, f"{spec} train"), _read_rows(validation, f"{spec} validation")


def _read_rows(rows: Any, what: str) -> list[Row]:
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise DataError(f"{what} is a {type(rows).__name__}; it must be a list of rows")
    return [_read_row(row, f"{what} row {i}") for i, row in enumerate(cast(Sequence[Any], rows))]


def _read_row(row: Any, origin: str) -> Row:
    if not isinstance(row, Mapping):
        raise DataError(f"{origin} is a {type(row).__name__}; it must be a dict with {', '.join(REQUIRED)}")
    missing = [key for key in REQUIRED if key not in row]
    unknown = [str(key) for key in cast(Mapping[Any, Any], row) if key not in REQUIRED + OPTIONAL]
    if missing or unknown:
        wrong = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}, which nothing reads"
        raise DataError(f"{origin} {wrong}; a row has {', '.join(REQUIRED)} and may have {', '.join(OPTIONAL)}")
    identity = row.get("id")
    return Row(
        prompt=read_prompt(row["prompt"], origin),
        ground_truth=as_json(row["ground_truth"], origin),
        data_source=encodable(str(row["data_source"]), origin),
        origin=origin,
        extra=read_extra(row.get("extra"), origin),
        prompt_id=None if identity is None else encodable(str(identity), origin),
    )
