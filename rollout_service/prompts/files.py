"""Rows of Parquet and JSONL files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from protocol.errors import DataError
from rollout_service.prompts.rows import Row, read_record

LINE_SUFFIXES = frozenset({".jsonl", ".ndjson"})
PARQUET_SUFFIX = ".parquet"
PARQUET_BATCH_ROWS = 4096  # rows that exist as Python objects and as Arrow at the same time


def read_files(paths: Sequence[Path], prompt_key: str, needs_label: bool) -> list[Row]:
    """Rows of all files, in order. Raises DataError naming the file and the row."""
    return [row for path in paths for row in _read_file(path, prompt_key, needs_label)]


def _read_file(path: Path, prompt_key: str, needs_label: bool) -> list[Row]:
    if not path.is_file():
        raise DataError(f"{path} does not exist; name a Parquet or JSONL file (relative paths start at {Path.cwd()})")
    suffix = path.suffix.lower()
    if suffix == PARQUET_SUFFIX:
        records = _read_parquet(path)
    elif suffix in LINE_SUFFIXES:
        records = _read_lines(path)
    else:
        raise DataError(f"{path} is neither a .parquet nor a .jsonl file; convert it, or load it with data.source")
    rows = [read_record(record, origin, path.stem, prompt_key, needs_label) for origin, record in records]
    if not rows:
        raise DataError(f"{path} has no rows; name a file with prompts")
    return rows


def _read_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(origin, record) of each line that isn't blank."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            origin = f"{path} line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                record = json.loads(text) if text else None
            except ValueError as error:
                raise DataError(f"{origin} is not JSON ({error}); mend or remove the line") from error
            if text and not isinstance(record, dict):
                raise DataError(f"{origin} is not a JSON object; write one object a line")
            if record is not None:
                yield origin, record


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
                for record in batch.to_pylist():
                    yield f"{path} row {number}", record
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} can't be read as Parquet ({error}); write it again") from error
