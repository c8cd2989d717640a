"""Questions with answers, from JSONL, CSV or TSV, to Parquet with verl's columns.

Always true: the output is whole or not there; it appears under its name when everything has been written.
"""

import csv
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from protocol.errors import DataError
from rollout_service.prompts.files import LINE_SUFFIXES, decode_line, read_lines
from rollout_service.prompts.rows import GSM8K_SOURCE, encodable, kind_of, read_gsm8k_answer

DELIMITERS = {".csv": ",", ".tsv": "\t"}
ROW_GROUP_ROWS = 4096  # rows that exist as Python objects at the same time
GSM8K_COLUMNS = ("question", "answer")
ABILITY = "math"  # of GSM8K, as verl's own preparation has it


@dataclass(frozen=True, slots=True)
class Conversion:
    """What to make of the rows. Without columns the files must be in GSM8K's format.

    `instruction` is appended to every question after a space; `split` goes into `extra_info`.
    """

    prompt_column: str | None = None
    answer_column: str | None = None
    data_source: str | None = None
    split: str = "train"
    instruction: str | None = None
    system_prompt: str | None = None


def convert(inputs: Sequence[Path], output: Path, how: Conversion, overwrite: bool = False) -> int:
    """Write one Parquet file of all rows; returns their number. Raises DataError naming the file and the row."""
    if (how.prompt_column is None) != (how.answer_column is None):
        raise DataError("name both columns, --prompt-column and --answer-column, or none for GSM8K's own format")
    if output.exists() and not overwrite:
        raise DataError(f"{output} exists; name another file, or say --force")
    if not output.parent.is_dir():
        raise DataError(f"{output.parent} is not a folder; make it, or name a file elsewhere")
    rows = (row for path in inputs for row in _rows(path, how))
    partial = output.with_name(output.name + ".partial")
    try:
        num_rows = _write(partial, (_record(row, index, how) for index, row in enumerate(rows)))
        partial.replace(output)
    except OSError as error:
        raise DataError(f"{output} can't be written ({error.strerror}); name a file in a folder that can") from error
    finally:
        partial.unlink(missing_ok=True)
    return num_rows


@dataclass(frozen=True, slots=True)
class _Pair:
    """A question and its answer: the whole one, and what is compared."""

    question: str
    answer: str
    label: str
    data_source: str


def _rows(path: Path, how: Conversion) -> Iterator[_Pair]:
    num_rows = 0
    for origin, record in _records(path):
        num_rows += 1
        yield _gsm8k_pair(record, origin, how) if how.prompt_column is None else _pair(record, origin, path, how)
    if not num_rows:
        raise DataError(f"{path} has no rows; name a file with questions")


def _gsm8k_pair(record: Mapping[str, Any], origin: str, how: Conversion) -> _Pair:
    question, answer = (record.get(column) for column in GSM8K_COLUMNS)
    if not isinstance(question, str) or not isinstance(answer, str):
        raise DataError(
            f"{origin} has no question and answer as text, only {', '.join(record)}; name the columns by "
            "--prompt-column and --answer-column"
        )
    label = read_gsm8k_answer(encodable(answer, origin), origin)
    return _Pair(encodable(question, origin), answer, label, how.data_source or GSM8K_SOURCE)


def _pair(record: Mapping[str, Any], origin: str, path: Path, how: Conversion) -> _Pair:
    question = _cell(record, str(how.prompt_column), origin)
    answer = _cell(record, str(how.answer_column), origin)
    return _Pair(question, answer, answer.strip(), how.data_source or path.stem)


def _cell(record: Mapping[str, Any], column: str, origin: str) -> str:
    if column not in record:
        raise DataError(f"{origin} has no column {column!r}, only {', '.join(map(str, record)) or 'none'}; correct it")
    value = record[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{origin}: {column!r} is {kind_of(value)}; it must be text or a number")
    text = str(value)
    if not text.strip():
        raise DataError(f"{origin}: {column!r} is empty; fill it or remove the row")
    return encodable(text, origin)


def _records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if path.is_dir():
        raise DataError(f"{path} is a folder; name the JSONL, CSV or TSV files in it")
    if not path.is_file():
        raise DataError(f"{path} does not exist; name a JSONL, CSV or TSV file")
    suffix = path.suffix.lower()
    if suffix in LINE_SUFFIXES:
        return read_lines(path)
    if suffix in DELIMITERS:
        return _read_table(path, DELIMITERS[suffix])
    raise DataError(f"{path} is neither .jsonl nor .csv nor .tsv; convert it to one of them first")


def _read_table(path: Path, delimiter: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(origin, record) of each row below the header. A cell may span lines: a row is named by its last one."""
    with _open(path) as stream:
        lines = (decode_line(line, path, number) for number, line in enumerate(stream, start=1))
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        header: list[str] = []
        try:
            for cells in reader:
                origin = f"{path} line {reader.line_num}"
                if not header:
                    header = _header(cells, origin)
                elif cells:
                    yield origin, _named(cells, header, origin)
        except csv.Error as error:
            raise DataError(f"{path} line {reader.line_num} is no row of a table ({error}); mend it") from error


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror}); name another file") from error


def _header(cells: list[str], origin: str) -> list[str]:
    if len(set(cells)) != len(cells) or not all(cells):
        raise DataError(f"{origin}: the header must name every column, and each differently; found {', '.join(cells)}")
    return cells


def _named(cells: list[str], header: list[str], origin: str) -> dict[str, str]:
    if len(cells) != len(header):
        raise DataError(f"{origin} has {len(cells)} cells and the header {len(header)}; mend the row")
    return dict(zip(header, cells, strict=True))


def _record(pair: _Pair, index: int, how: Conversion) -> dict[str, Any]:
    """One row as verl's own preparation writes it."""
    content = f"{pair.question} {how.instruction}" if how.instruction else pair.question
    system = [{"role": "system", "content": how.system_prompt}] if how.system_prompt else []
    return {
        "data_source": pair.data_source,
        "prompt": [*system, {"role": "user", "content": content}],
        "ability": ABILITY if pair.data_source == GSM8K_SOURCE else "",
        "reward_model": {"style": "rule", "ground_truth": pair.label},
        "extra_info": {"split": how.split, "index": index, "question": pair.question, "answer": pair.answer},
    }


def _write(path: Path, records: Iterable[dict[str, Any]]) -> int:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(f"{path} needs pyarrow ({error}); install april-rollout[service]") from error
    text = pa.string()
    extra = {"split": text, "index": pa.int64(), "question": text, "answer": text}
    schema = pa.schema(
        {
            "data_source": text,
            "prompt": pa.list_(pa.struct({"role": text, "content": text})),
            "ability": text,
            "reward_model": pa.struct({"style": text, "ground_truth": text}),
            "extra_info": pa.struct(extra),
        }
    )
    num_rows, left = 0, iter(records)
    with pq.ParquetWriter(path, schema) as writer:
        while chunk := list(itertools.islice(left, ROW_GROUP_ROWS)):
            writer.write_table(pa.Table.from_pylist(chunk, schema=schema))
            num_rows += len(chunk)
    return num_rows
