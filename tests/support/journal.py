"""A history on disk: JSON lines that many processes append to, and the batches that they were served.

Always true: a record is written by one `write` to a file opened for appending, so records of processes that are killed
are whole, and those of several processes don't mix; `at` is the monotonic clock, which all processes here share.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from tests.support.flight import read_flights

Record = dict[str, Any]

BATCHES = "batches"


class Journal:
    """The history in a folder; every process opens its own."""

    def __init__(self, folder: Path) -> None:
        self._batches = folder / BATCHES
        self._batches.mkdir(parents=True, exist_ok=True)
        self._file = os.open(folder / "history.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record."""
        record = {"kind": kind, "at": time.monotonic(), "pid": os.getpid()} | fields
        os.write(self._file, (json.dumps(record) + "\n").encode())

    def keep_batch(self, sha256: str, data: bytes) -> None:
        """Keep the bytes of a batch under their digest."""
        path = self._batches / sha256
        if not path.exists():
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_bytes(data)
            partial.replace(path)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_history(folder: Path) -> tuple[list[Record], dict[str, bytes]]:
    """(records in the order of time, flight recorders last; batches by digest)."""
    lines = (folder / "history.jsonl").read_text().splitlines()
    records = sorted((json.loads(line) for line in lines), key=lambda record: record["at"])
    records += read_flights(folder)
    batches = {path.name: path.read_bytes() for path in (folder / BATCHES).iterdir() if not path.suffix}
    return records, batches
