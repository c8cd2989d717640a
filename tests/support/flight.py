"""What a process was doing when it was killed: a table in a file that is mapped into its memory.

Always true: a store into the mapping needs no system call and outlives SIGKILL, since the pages belong to the kernel;
one process writes a table, and it is read after that process has ended. A row is one attempt at one sample; a free row
has no sample.
"""

from pathlib import Path
from typing import Any

import numpy as np

NUM_ROWS = 2048  # attempts at once; the simulated engine runs tens
PREFIX = "flight-"

ROW = np.dtype(
    [
        ("sample", "S24"),
        ("attempt", "i8"),
        ("generated", "i8"),  # end of what the engine has written; as far as received where the engine does not say
        ("received", "i8"),  # end of what the service has taken from the stream
        ("stored", "i8"),  # end of what the buffer has acknowledged
        ("pending_since", "f8"),  # when the write was sent that has no answer yet; 0 without one
        ("write_s", "f8"),  # how long the last acknowledged write took
        ("unsent_since", "f8"),  # when the first token arrived that no write holds; 0 without one
        ("received_at", "f8"),  # when the last token arrived
    ]
)


class FlightRecorder:
    """The table of the process `pid` in a folder."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._rows = np.memmap(folder / f"{PREFIX}{pid}", ROW, "w+", shape=(NUM_ROWS,))
        self._free = list(range(NUM_ROWS))
        self._row_of: dict[tuple[str, int], int] = {}

    def begin(self, sample: str, attempt: int, length: int) -> None:
        """An attempt starts with `length` tokens, all stored."""
        index = self._row_of.setdefault((sample, attempt), self._free[-1])
        if self._free and self._free[-1] == index:
            self._free.pop()
        self._rows[index] = (b"", attempt, length, length, length, 0.0, 0.0, 0.0, 0.0)
        self._rows[index]["sample"] = sample.encode()  # last: a row without a sample is free

    def set(self, sample: str, attempt: int, **fields: float) -> None:
        """Change fields of an attempt; nothing if it is over."""
        index = self._row_of.get((sample, attempt))
        if index is not None:
            row = self._rows[index]
            for name, value in fields.items():
                row[name] = value

    def get(self, sample: str, attempt: int, field: str) -> float:
        """A field of an attempt; 0 if it is over."""
        index = self._row_of.get((sample, attempt))
        return 0.0 if index is None else float(self._rows[index][field])

    def end(self, sample: str, attempt: int) -> None:
        """The attempt is over, and everything that it had is stored or was refused."""
        index = self._row_of.pop((sample, attempt), None)
        if index is not None:
            self._rows[index]["sample"] = b""
            self._free.append(index)


def read_flights(folder: Path) -> list[dict[str, Any]]:
    """One record for each process that left a table: its pid and the attempts that were running."""
    records: list[dict[str, Any]] = []
    for path in sorted(folder.glob(f"{PREFIX}*")):
        rows = np.fromfile(path, ROW)
        running = [_plain(row) for row in rows if row["sample"]]
        records.append({"kind": "flight", "at": 0.0, "pid": int(path.name[len(PREFIX) :]), "rows": running})
    return records


def _plain(row: np.void) -> dict[str, Any]:
    fields = {name: row[name].item() for name in ROW.names or ()}
    return fields | {"sample": fields["sample"].decode()}
