"""Rows of Parquet and JSONL files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from protocol.errors import DataError
from rollout_service.prompts.rows import Row, kind_of, read_record

LINE_SUFFIXES = frozenset({".jsonl", ".ndjson"})
PARQUET_SUFFIX = ".parquet"
PARQUET_BATCH_ROWS = 4096  # rows that exist as Python objects and as Arrow at the same time


def read_files(paths: Sequence[Path], prompt_key: str, needs_label: bool) -> list[Row]:
    """Rows of all files, in order. Raises DataError naming the file and the row."""
    return [row for path in paths for row in _read_file(path, prompt_key, needs_label)]


def _read_file(path: Path, prompt_key: str, needs_label: bool) -> list[Row]:
    if path.is_dir():
        raise DataError(f"{path} is a folder; name the Parquet or JSONL files in it")
    if not path.is_file():
        raise DataError(f"{path} does not exist; name a Parquet or JSONL file (relative paths start at {Path.cwd()})")
    suffix = path.suffix.lower()
    if suffix == PARQUET_SUFFIX:
        records = _read_parquet(path)
    elif suffix in LINE_SUFFIXES:
        records = read_lines(path)
    else:
        raise DataError(f"{path} is neither a .parquet nor a .jsonl file; convert it, or load it with data.source")
    rows = [read_record(record, origin, path.stem, prompt_key, needs_label) for origin, record in records]
    if not rows:
        raise DataError(f"{path} has no rows; name a file with prompts")
    _check_one_kind(rows)
    return rows


def _check_one_kind(rows: Sequence[Row]) -> None:
    """A file with both kinds of prompts was put together from two, and one half of it may lack its system message."""
    kind = type(rows[0].prompt)
    for row in rows:
        if type(row.prompt) is not kind:
            raise DataError(
                f"{row.origin}: the prompt is {kind_of(row.prompt)}, while that of {rows[0].origin} is "
                f"{kind_of(rows[0].prompt)}; write all prompts of a file in one way"
            )


def read_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(origin, record) of each line that isn't blank. Raises DataError naming the line."""
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                text = decode_line(line, path, number).strip()
                if text:
                    yield f"{path} line {number}", _parse(text, f"{path} line {number}")
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror}); name another file") from error


def decode_line(line: bytes, path: Path, number: int) -> str:
    """A line as text, a byte order mark in front of the first one left out. Raises DataError naming the line."""
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} line {number} is not UTF-8 (byte {line[error.start]:#04x} at {error.start}); write the file as "
            "UTF-8"
        ) from error


def _parse(text: str, origin: str) -> Mapping[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{origin} is not JSON ({error}); mend or remove the line") from error
    if not isinstance(record, dict):
        raise DataError(f"{origin} is not a JSON object; write one object a line")
    return cast(Mapping[str, Any], record)


def _read_parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(origin, record) of each row."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path} needs pyarrow ({error}); install april-rollout[service]") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                for record in _records(batch, path, number):
                    yield f"{path} row {number}", record
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} can't be read as Parquet ({error}); write it again") from error


def _records(batch: Any, path: Path, first: int) -> list[dict[str, Any]]:
    """Records of an Arrow batch that begins at row `first`; strings in Parquet may be any bytes."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        for row in range(batch.num_rows):
            for name in batch.schema.names:
                _check_cell(batch.column(name)[row], f"{path} row {first + row}", name)
        raise


def _check_cell(cell: Any, origin: str, column: str) -> None:
    try:
        cell.as_py()
    except UnicodeDecodeError as error:
        raise DataError(f"{origin}: column {column!r} is not UTF-8; write the file again as UTF-8") from error
