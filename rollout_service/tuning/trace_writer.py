"""Traces on disk: files in the run's folder, written by a thread of their own.

Always true:
- `put` never waits and never raises: the event loop hands a record over, serialising and writing is the thread's work;
- a disk that fails ends the trace with one warning, and nothing else;
- what waits to be written is bounded: beyond that records are dropped, counted, and the count is written as a line;
- a service life has files of its own, named by its epoch, so it never appends to a line that a crash tore.
"""

import json
import logging
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

from rollout_service.tuning.trace_records import Header, LostLine

log = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.5  # two wake-ups a second cost nothing; a crash loses half a second of trace
MAX_WAITING = 50_000  # records, some tens of megabytes: minutes of a disk that hangs
# The lines are fresh and hold no cycles; spaces would be a tenth of the file.
ENCODER = json.JSONEncoder(check_circular=False, separators=(",", ":"))
CLOSE_TIMEOUT_S = 5.0  # a disk that hangs doesn't keep the service from stopping


def trace_folder(run_dir: Path) -> Path:
    """Where a run's trace is."""
    return run_dir / "trace"


class TraceWriter:
    """Appends records to `FOLDER/EPOCH-NUMBER.jsonl`; a new number at `max_file_bytes`, at most `max_files` in all."""

    def __init__(self, folder: Path, header: Header, max_file_bytes: int, max_files: int) -> None:
        self._folder = folder
        self._header = header
        self._max_file_bytes = max_file_bytes
        self._max_files = max_files
        self._waiting: deque[dict[str, Any]] = deque()
        self._num_lost = 0  # written by the caller's thread alone
        self._num_told = 0  # written by the thread alone: of those lost, how many a line has told of
        self._number = 0
        self._num_bytes = 0
        self._file: BinaryIO | None = None
        self._stopped = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, name="april-trace", daemon=True)
        self._thread.start()

    @property
    def stopped(self) -> bool:
        """Nothing is written any more: it was closed, or the disk failed."""
        return self._stopped

    def put(self, record: dict[str, Any]) -> None:
        """Have a line written soon; it is not to be changed any more."""
        if self._stopped:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._num_lost += 1
        else:
            self._waiting.append(record)

    def close(self) -> None:
        """Write what waits, and stop. Later records are dropped."""
        self._stopped = True
        self._wake.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("the trace in %s is not complete: its disk doesn't answer", self._folder)

    def _work(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            while not self._stopped:
                self._wake.wait(FLUSH_INTERVAL_S)
                self._write_waiting()
            self._write_waiting()
        except OSError as error:
            log.warning(
                "the trace stops, the run goes on: can't write to %s (%s)", self._folder, error.strerror or error
            )
        finally:
            self._stopped = True
            self._waiting.clear()
            self._close_file()

    def _write_waiting(self) -> None:
        lost = self._num_lost - self._num_told
        lines = [ENCODER.encode(self._waiting.popleft()).encode() for _ in range(len(self._waiting))]
        if lost:
            lines.append(LostLine(num_lines=lost).model_dump_json().encode())
            self._num_told += lost
        if not lines:
            return
        start = 0
        while start < len(lines):
            if self._file is None or self._num_bytes >= self._max_file_bytes:
                self._next_file()
            assert self._file is not None, "a file was opened just now"
            room, end = self._max_file_bytes - self._num_bytes, start
            while end < len(lines) and room > 0:
                room -= len(lines[end]) + 1
                end += 1
            self._num_bytes += self._file.write(b"\n".join(lines[start:end]) + b"\n")
            start = end
        assert self._file is not None, "there were lines"
        self._file.flush()

    def _next_file(self) -> None:
        self._close_file()
        path = self._folder / f"{self._header.service_epoch:06d}-{self._number:04d}.jsonl"
        header = self._header.model_copy(update={"file": self._number, "started_at": round(time.time(), 3)})
        self._file = path.open("ab")
        self._num_bytes = self._file.write(header.model_dump_json().encode() + b"\n")
        self._number += 1
        for old in sorted(self._folder.glob("*-*.jsonl"))[: -self._max_files]:
            old.unlink(missing_ok=True)

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()
        except OSError as error:
            log.warning("the end of the trace was not written to %s (%s)", self._folder, error.strerror or error)
