"""Live progress of what the demo makes: a bar on a terminal, JSON lines anywhere else."""

import json
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from deploy.demo.teaching import TeachingProgress


@contextmanager
def reporting(what: str, console: Console | None = None) -> Generator[Callable[[TeachingProgress], None]]:
    """A callback for `make_base_policy` that shows where the making of `what` is."""
    console = console or Console()
    if not console.is_terminal:
        yield lambda update: _write_line({"making": what} | asdict(update))
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}"), console=console) as bar:
        shown = bar.add_task(what, total=None, loss=float("nan"), visible=False)

        def show(update: TeachingProgress) -> None:
            bar.update(
                shown,
                description=f"{what}: {update.phase}",
                completed=update.step,
                total=update.num_steps,
                loss=update.loss,
                visible=True,
            )

        yield show


def report(values: dict[str, Any], console: Console | None = None) -> None:
    """Results: a table on a terminal, one JSON line anywhere else."""
    console = console or Console()
    if not console.is_terminal:
        _write_line(values)
        return
    table = Table(show_header=False)
    for name, value in values.items():
        table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    console.print(table)


def _write_line(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()
