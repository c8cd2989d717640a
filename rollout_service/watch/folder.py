"""The files of a run's folder, line by line, for a report: what is torn or foreign is passed over, and said so.

Always true: lines come in the order in which they were written, those of an earlier life of the service first; a
folder that holds traces of two runs is refused, since their samples can't be told apart.
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from protocol.errors import DataError
from rollout_service.tuning.trace_reader import trace_files
from rollout_service.tuning.trace_records import LINE, SCHEMA, SCHEMA_VERSION, Header

Progress = Callable[[int, int], None]  # bytes read, bytes in all
METRICS_NAME = "metrics.jsonl"  # in the trainer's folder
PROGRESS_LINES = 5_000  # lines between two words on how far it is


class TraceFolder:
    """Reads a trace once; `notes`, `header` and `num_lives` are complete when `lines` has ended."""

    def __init__(self, run_dir: Path, newest_bytes: int | None = None) -> None:
        """Of `newest_bytes`: only the end of it, of about this size."""
        self.notes: list[str] = []
        self.header: Header | None = None
        self._epochs: set[int] = set()
        self._files = trace_files(run_dir)
        self._skipped = dict.fromkeys(self._files, 0)
        if newest_bytes is not None:
            self._leave_out(newest_bytes)

    @property
    def num_lives(self) -> int:
        """How often the service was started, of those starts that left a trace."""
        return len(self._epochs)

    def lines(self, progress: Progress | None = None) -> Iterator[dict[str, Any]]:
        """Every record of every file; `header` is that of the file which a record is in."""
        total = sum(_size(file) for file in self._files)
        done = 0
        for file in self._files:
            for number, (line, size) in enumerate(self._file(file), 1):
                done += size
                if line is not None:
                    yield line
                if progress is not None and number % PROGRESS_LINES == 0:
                    progress(done, total)
        if progress is not None:
            progress(total, total)

    def _leave_out(self, newest_bytes: int) -> None:
        room = newest_bytes
        for file in reversed(self._files):
            size = _size(file)
            self._skipped[file] = max(0, size - max(0, room))
            room -= size
        self._files = [file for file in self._files if self._skipped[file] < _size(file)]

    def _file(self, file: Path) -> Iterator[tuple[dict[str, Any] | None, int]]:
        num_bad, torn = 0, False
        try:
            with file.open("rb") as opened:
                if not self._take_header(file, opened.readline()):
                    return
                if self._skipped[file] > opened.tell():
                    opened.seek(self._skipped[file])
                    opened.readline()  # the rest of a line
                for raw in opened:
                    torn = not raw.endswith(b"\n")
                    record = _record(raw)
                    num_bad += record is None and not torn
                    yield record, len(raw)
        except FileNotFoundError:
            self.notes.append(f"{file.name} was removed while it was read, as the oldest beyond trace.max_files is")
        except OSError as error:
            raise DataError(f"can't read {file} ({error.strerror}); check the path and its permissions") from error
        if torn:
            self.notes.append(f"{file.name}: the last line is torn and was left out")
        if num_bad:
            are = "line is no line" if num_bad == 1 else "lines are no lines"
            self.notes.append(f"{file.name}: {num_bad} {are} of a trace and {_was(num_bad)} left out")

    def _take_header(self, file: Path, raw: bytes) -> bool:
        try:
            header = LINE.validate_json(raw)
        except ValidationError:
            header = None
        if not isinstance(header, Header) or (header.schema_name, header.version) != (SCHEMA, SCHEMA_VERSION):
            self.notes.append(f"{file.name} {_why_not(raw, header)} and was passed over")
            return False
        if self.header is not None and self.header.run != header.run:
            raise DataError(
                f"{file.parent} mixes traces of the runs {self.header.run} and {header.run}: move the files apart"
            )
        self._note_gap(file, header)
        self.header = header
        self._epochs.add(header.service_epoch)
        return True

    def _note_gap(self, file: Path, header: Header) -> None:
        """Files of one life of the service are numbered from 0 on."""
        before = self.header
        goes_on = before is not None and before.service_epoch == header.service_epoch
        expected = before.file + 1 if before is not None and goes_on else 0
        if header.file > expected:
            gone = header.file - expected
            self.notes.append(f"{file.name}: {gone} {'file before it is' if gone == 1 else 'files before it are'} gone")


def _was(count: int) -> str:
    return "was" if count == 1 else "were"


def _why_not(raw: bytes, header: object) -> str:
    if not raw:
        return "is empty"
    if isinstance(header, Header) and header.schema_name == SCHEMA:
        return f"was written by another version of april (schema {header.version}, this one reads {SCHEMA_VERSION})"
    return "has no header that this version of april reads"


def _size(file: Path) -> int:
    """0 of a file that the service took away meanwhile, as it does with the oldest."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _record(raw: bytes) -> dict[str, Any] | None:
    try:
        record = LINE.validate_json(raw)
    except ValidationError:
        return None
    return None if isinstance(record, Header) else dict(record)


def _is_metric(name: str, value: object) -> bool:
    """A number that can be drawn; what is not finite is not known."""
    return name != "at" and isinstance(value, int | float) and math.isfinite(value)


def step_lines(file: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, metrics) of the trainer's metrics file, as they were written; nothing if there is none."""
    if not file.is_file():
        notes.append(f"the trainer left no {file.name}: the metrics of its steps are not known")
        return
    num_bad = 0
    with file.open("rb") as opened:
        for raw in opened:
            try:
                values = json.loads(raw)
                step = int(values.pop("step"))
                numbers = {str(k): float(v) for k, v in values.items() if _is_metric(k, v)}
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                num_bad += 1
                continue
            yield step, numbers
    if num_bad:
        are = "line is" if num_bad == 1 else "lines are"
        notes.append(f"{file.name}: {num_bad} {are} torn and {_was(num_bad)} left out")
