"""`april report`: a finished run's pictures in one HTML file, its numbers as JSON, and what they say in a sentence.

Always true: it only reads what a run left in its folder, so it may look at a run that still goes on; a file appears
whole or not at all, and whether it can be written is known before the trace is read.
"""

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from deploy.console import run_reporting_errors

if TYPE_CHECKING:
    from protocol.watching import Quantiles, RunReport

FILE = click.Path(path_type=Path, dir_okay=False)
REPORT_NAME = "report.html"
READ = ("trace/*", "trainer/metrics.jsonl", "service/*", "run.json")  # of a run's folder: never replaced
PIPE_WIDTH = 110  # a pipe has no width, and a sentence should stay one
Advance = Callable[[int, int], None]  # bytes read, of how many


@click.command()
@click.option("--html", "html_file", type=FILE, help=f"The HTML file [default: {REPORT_NAME} in RUN_DIR].")
@click.option("--json", "json_file", type=FILE, help="Write the whole report as JSON, too.")
@click.option("--predict/--no-predict", default=True, show_default=True, help="Simulate what other ratios would do.")
@click.argument("run_dir", type=click.Path(path_type=Path), metavar="RUN_DIR")
def report(run_dir: Path, html_file: Path | None, json_file: Path | None, predict: bool) -> None:
    """Write one self-contained HTML file of the run in RUN_DIR: its pictures, settings and versions."""

    def work() -> None:
        from rollout_service.dashboard.report import render_report
        from rollout_service.tuning.report_files import check_outputs, write_report
        from rollout_service.watch.report import run_report

        html = html_file or run_dir / REPORT_NAME
        outputs = [html, *([json_file] if json_file else [])]
        if run_dir.is_dir():
            check_outputs(outputs, [path for name in READ for path in run_dir.glob(name)])
        with _reading() as advance:
            made = run_report(run_dir, advance, predict)
        write_report(html, render_report(made).encode())
        if json_file is not None:
            write_report(json_file, (made.model_dump_json(indent=2) + "\n").encode())
        show(made, outputs)

    run_reporting_errors(work)


def show(made: "RunReport", written: list[Path]) -> None:
    """What the report says, in the terminal, and where it is."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    console.print(facts_table(made))
    console.print(tail_table(made))
    for sentence in (made.verdict.sentence, made.verdict.advice, *made.notes):
        if sentence:
            console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    for path in written:
        console.print(f"written: {path}", highlight=False, markup=False, soft_wrap=True)


def facts_table(made: "RunReport") -> Table:
    """The run's numbers by name."""
    table = _table(f"Run {made.run}", "", "")
    for name, value in made.facts.items():
        table.add_row(name, _number(value))
    if made.ratio is not None:
        table.add_row("ratio", _number(made.ratio.ratio))
        if made.ratio.recommended is not None:
            table.add_row("recommended ratio", _number(made.ratio.recommended))
    return table


def tail_table(made: "RunReport") -> Table:
    """How long responses are and take."""
    responses = "response" if made.tail.num_finished == 1 else "responses"
    table = _table(f"{made.tail.num_finished:,} {responses}", "", "p50", "p90", "p99", "max")
    rows: tuple[tuple[str, Quantiles], ...] = (
        ("tokens", made.tail.tokens),
        ("tokens, unfinished ones counted", made.tail.survival_tokens),
        ("seconds to finish", made.tail.finish_s),
    )
    for name, values in rows:
        table.add_row(name, *map(_number, (values.p50, values.p90, values.p99, values.largest)))
    return table


def _table(title: str, *heads: str) -> Table:
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, show_header=any(heads), padding=(0, 1, 0, 0)
    )
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", no_wrap=True)
    return table


def _number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    if value == int(value) or abs(value) >= 999.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 99.95 else f"{value:.3g}"


@contextmanager
def _reading() -> Generator[Advance]:
    """A bar over the bytes of the trace, on a terminal; a big one takes a minute to read."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        reading = bar.add_task("reading the trace", total=None)

        def advance(done: int, total: int) -> None:
            text = "reading the trace" if done < total else "drawing"
            bar.update(reading, completed=done, total=total, description=text)

        yield advance
