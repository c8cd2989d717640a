"""Lengths from elsewhere: a column of a CSV file, a plain list, a distribution; and how they become a trace.

Always true: a row that has no length is named with its line and refused, not passed over; a file that is a trace of
this project is read as one.
"""

import csv
from collections.abc import Iterator
from pathlib import Path

from protocol.errors import DataError, SettingsError
from rollout_service.tuning.length_specs import is_spec, parse_lengths
from rollout_service.tuning.lengths import FlatLengths, LengthSource, SpecLengths, lengths_of_trace
from rollout_service.tuning.trace_reader import read_trace
from rollout_service.tuning.trace_records import Header, LengthLine

NO_PROMPT = (0,)  # prompts of no tokens cost no prefill, which is what is known of them


def read_lengths(source: str, lengths_column: str | None, prompt_column: str | None) -> LengthSource:
    """Lengths of a distribution, a CSV file, a list of numbers, a trace, or a run's folder, whichever `source` is."""
    if is_spec([source]):
        return SpecLengths(source, parse_lengths(source))
    path = Path(source)
    if path.is_file() and path.suffix != ".jsonl":
        if lengths_column is None and path.suffix == ".csv":
            raise SettingsError(
                f"say which column of {path} has the lengths: --lengths-column, one of {_columns(path)}"
            )
        return read_column(path, lengths_column, prompt_column) if lengths_column else read_list(path)
    return lengths_of_trace(read_trace(path))


def read_column(path: Path, lengths_column: str, prompt_column: str | None) -> FlatLengths:
    """A CSV file with a header. Raises DataError with the line that can't be read."""
    columns = _columns(path)
    for name in filter(None, (lengths_column, prompt_column)):
        if name not in columns:
            raise SettingsError(f"{path} has no column {name!r}; its columns are {', '.join(columns)}")
    lengths: list[int] = []
    prompts: list[int] = []
    rows = csv.DictReader(_text(path).splitlines())
    for row in rows:
        lengths.append(_count(row[lengths_column], path, rows.line_num))
        if prompt_column:
            prompts.append(_count(row[prompt_column], path, rows.line_num))
    return _flat(path, lengths, prompts)


def read_list(path: Path) -> FlatLengths:
    """One length a line; a second number is the prompt's length; empty lines and those that start with # are passed."""
    lengths: list[int] = []
    prompts: list[int] = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        fields = line.replace(",", " ").split()
        if not fields or line.lstrip().startswith("#"):
            continue
        lengths.append(_count(fields[0], path, number))
        if len(fields) > 1:
            prompts.append(_count(fields[1], path, number))
    return _flat(path, lengths, prompts)


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


def _flat(path: Path, lengths: list[int], prompts: list[int]) -> FlatLengths:
    """Responses of no token, which serving logs have, never ran and are left out."""
    whole = tuple(length for length in lengths if length > 0)
    if not whole:
        raise DataError(f"{path} has no length above zero: name another column or file")
    return FlatLengths(path.name, whole, tuple(prompts) or NO_PROMPT)


def _count(text: str | None, path: Path, line: int) -> int:
    try:
        value = float(text or "")
    except ValueError:
        value = -1.0
    if value < 0 or value != int(value):
        raise DataError(f"{path}, line {line}: {text!r} is no number of tokens; mend the line or take it out")
    return int(value)


def _columns(path: Path) -> list[str]:
    lines = _text(path).splitlines()
    return next(csv.reader(lines[:1]), [])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"can't read {path} as text ({error}); check the path") from error
