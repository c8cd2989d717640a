"""How benchmarks report."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

FILE_WIDTH = 200  # characters: a table in a file is for reading, no terminal folds it


def report(title: str, rows: Sequence[Mapping[str, object]], json_file: Path | None) -> None:
    """Print `rows` as a table; write them to `json_file` if there is one."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(table)
    if json_file:
        json_file.write_text(json.dumps([dict(row) for row in rows], indent=2) + "\n")
