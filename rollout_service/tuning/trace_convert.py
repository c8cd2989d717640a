"""Lengths from elsewhere: a column of a CSV file, a plain list, a distribution; and how they become a trace.

Always true: a row that has no length is named with its line and refused, not passed over; a file that is a trace of
this project is read as one.
"""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from protocol.errors import DataError, SettingsError
from rollout_service.tuning.length_specs import is_spec, parse_lengths
from rollout_service.tuning.lengths import FlatLengths, LengthSource, SpecLengths, lengths_of_trace
from rollout_service.tuning.trace_reader import GZIP, read_trace
from rollout_service.tuning.trace_records import MAX_TOKENS, Header, LengthLine

DELIMITERS = (",", ";", "\t")  # what spreadsheets and logs write
NO_PROMPT = (0,)  # prompts of no tokens cost no prefill, which is what is known of them


def read_lengths(source: str, lengths_column: str | None, prompt_column: str | None) -> LengthSource:
    """Lengths of a distribution, a CSV file, a list of numbers, a trace, or a run's folder, whichever `source` is."""
    named = lengths_column or prompt_column
    if is_spec([source]):
        if named:
            raise SettingsError(f"a distribution has no column {named!r}: leave the column out, or name a CSV file")
        return SpecLengths(source, parse_lengths(source))
    path = Path(source)
    if not path.exists():
        raise DataError(f"there is no file {path}: name a CSV file, a list of numbers, a trace, or a run's folder")
    if is_trace(path):
        if named:
            raise SettingsError(f"{path} is a trace and has no column {named!r}: leave the column out")
        return lengths_of_trace(read_trace(path))
    if lengths_column is None and (path.suffix == ".csv" or prompt_column):
        columns = ", ".join(_Table(path).columns)
        raise SettingsError(f"say which column of {path} has the lengths: --lengths-column, one of {columns}")
    return read_column(path, lengths_column, prompt_column) if lengths_column else read_list(path)


def is_trace(path: Path) -> bool:
    """Whether this is to be read as a trace: a folder, or a file that is named like one."""
    return path.is_dir() or path.suffix == ".jsonl"


def read_column(path: Path, lengths_column: str, prompt_column: str | None) -> FlatLengths:
    """A CSV file with a header. Raises DataError with the line that can't be read."""
    table = _Table(path)
    wanted = [table.index(name) for name in (lengths_column, prompt_column) if name is not None]
    rows: list[tuple[int, ...]] = []
    for line, fields in table.rows():
        rows.append(tuple(_count(fields[i] if i < len(fields) else "", path, line) for i in wanted))
    return _flat(path, rows)


def read_list(path: Path) -> FlatLengths:
    """One length a line; a second number is the prompt's length; empty lines and those that start with # are passed."""
    rows: list[tuple[int, ...]] = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        fields = line.replace(",", " ").split()
        if not fields or line.lstrip().startswith("#"):
            continue
        if len(fields) > 2:
            raise DataError(
                f"{path}, line {number} has {len(fields)} fields: a list has one length a line, and the prompt's if it "
                "is known; a table is named FILE.csv or read with --lengths-column"
            )
        rows.append(tuple(_count(field, path, number) for field in fields))
    return _flat(path, rows)


def converted(lengths: LengthSource, num_prompts: int, num_samples: int) -> Iterator[Header | LengthLine]:
    """The lines of a trace. A list becomes prompts of one sample each; a distribution is drawn from."""
    yield Header(run=f"converted from {lengths.name}")
    if isinstance(lengths, FlatLengths):
        prompts = lengths.prompt_tokens
        for index, length in enumerate(lengths.lengths):
            prompt_tokens = prompts[index % len(prompts)]
            yield LengthLine(prompt=f"p{index}", prompt_tokens=prompt_tokens, num_tokens=length)
        return
    workload = lengths.workload(seed=0, bootstrap=False)
    for index in range(num_prompts):
        prompt = workload.prompt(index, num_samples)
        for length in prompt.lengths:
            yield LengthLine(
                prompt=f"p{index}", source=prompt.data_source, prompt_tokens=prompt.prompt_tokens, num_tokens=length
            )


class _Table:
    """A CSV file: fields are kept apart by the one of `,`, `;` and the tab that its header has most of."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = _text(path)
        first = self._text.partition("\n")[0]
        self._delimiter = max(DELIMITERS, key=first.count)
        self.columns = [name.strip() for name in next((fields for _, fields in self._records()), [])]
        if not any(self.columns):
            raise DataError(f"{path} has no header: its first line must name the columns")

    def index(self, name: str) -> int:
        """Where a column is."""
        if (found := self.columns.count(name)) == 1:
            return self.columns.index(name)
        if found:
            raise DataError(f"{self._path} has {found} columns {name!r}: take all but one out, or rename them")
        raise SettingsError(f"{self._path} has no column {name!r}; its columns are {', '.join(self.columns)}")

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """The rows below the header, each with the number of its last line; empty ones are passed."""
        records = self._records()
        next(records)
        for line, fields in records:
            if len(fields) > len(self.columns):
                raise DataError(
                    f"{self._path}, line {line} has {len(fields)} fields and the header {len(self.columns)}: quote "
                    f"what holds a {self._delimiter!r}, or take the line out"
                )
            yield line, fields

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        reader = csv.reader(io.StringIO(self._text, newline=""), delimiter=self._delimiter, skipinitialspace=True)
        try:
            for fields in reader:
                if fields:
                    yield reader.line_num, fields
        except csv.Error as error:
            raise DataError(
                f"{self._path}, line {reader.line_num} is no CSV ({error}); mend it or take it out"
            ) from error


def _flat(path: Path, rows: Sequence[tuple[int, ...]]) -> FlatLengths:
    """Lengths, each with its prompt's where that is known. Responses of no token, as logs have, never ran: left out."""
    whole = [row for row in rows if row[0] > 0]
    if not whole:
        raise DataError(f"{path} has no length above zero: name another column or file")
    width = len(whole[0])
    if any(len(row) != width for row in whole):
        raise DataError(f"{path} has prompt lengths on some lines only: give them on all lines, or on none")
    prompts = tuple(row[1] for row in whole) if width > 1 else NO_PROMPT
    return FlatLengths(path.name, tuple(row[0] for row in whole), prompts)


def _count(text: str, path: Path, line: int) -> int:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0 <= value <= MAX_TOKENS and value == int(value)):
        raise DataError(f"{path}, line {line}: {text!r} is no number of tokens; mend the line or take it out")
    return int(value)


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if data.startswith(GZIP):
            raise DataError(f"{path} is packed by gzip: unpack it with `gzip -d`, and name what comes out")
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig").read()
    except OSError as error:
        raise DataError(f"can't read {path} ({error.strerror}); check the path and its permissions") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is no text in UTF-8 ({error.reason} at byte {error.start}); convert it first"
        ) from error
