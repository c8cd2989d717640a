"""`april from-verl`: a verl launch script becomes a RUN.toml and a table of what became of each parameter."""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from deploy.console import run_reporting_errors
from deploy.toml import toml_text
from deploy.verl.notes import find_notes
from deploy.verl.outcome import Status
from deploy.verl.overrides import find_command, find_overrides, find_replaced
from deploy.verl.shell import read_with_notes
from deploy.verl.translate import Row, Translation, translate
from protocol.errors import DataError, SettingsError
from protocol.settings import load_settings

COLOURS = {
    Status.CARRIED: "green",
    Status.CHANGED: "yellow",
    Status.ADDED: "cyan",
    Status.NOT_CARRIED: "dim",
    Status.UNKNOWN: "red",
}
KNOWN_VARIABLES = ("HOME", "PWD", "USER")  # others could be secrets, and differ where the run will be
PIPE_WIDTH = 160  # of the table where no terminal says its width
OUTPUT = click.Path(path_type=Path, dir_okay=False, writable=True)


@click.command("from-verl")
@click.option("-o", "--output", type=OUTPUT, default=Path("RUN.toml"), show_default=True, help="File to write.")
@click.option("--json", "json_file", type=OUTPUT, help="Write the table as JSON.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.argument("script", type=click.Path(path_type=Path), metavar="SCRIPT")
def from_verl(script: Path, output: Path, json_file: Path | None, force: bool) -> None:
    """Translate a verl launch SCRIPT into a RUN.toml, and say what could not be carried. Nothing is executed."""
    run_reporting_errors(lambda: _convert(script, output, json_file, force))


def convert(script: Path) -> Translation:
    """The settings that `script` asks for; raises `DataError` if it can't be read or starts no training."""
    try:
        text = script.read_bytes().decode()  # as it is: a line's end of DOS is told
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{script} can't be read ({error}); name a verl launch script") from error
    environment = {name: os.environ[name] for name in KNOWN_VARIABLES if name in os.environ}
    commands, notes = read_with_notes(text, environment)
    notes += find_notes(commands, find_command(commands)) + find_replaced(commands)
    return translate(find_overrides(commands), sorted(notes, key=lambda note: note.line))


def run_toml(translation: Translation, script: Path) -> str:
    """RUN.toml of a translation, with a comment on what is new here."""
    heading = f"# From {script.name}. `april train RUN.toml --dry-run` shows every setting.\n\n"
    return heading + toml_text(translation.values, translation.comments)


def _convert(script: Path, output: Path, json_file: Path | None, force: bool) -> None:
    if output.exists() and not force:
        raise DataError(f"{output} exists; give another name with -o, or --force to replace it")
    translation = convert(script)
    output.write_text(run_toml(translation, script))
    if json_file:
        json_file.write_text(json.dumps([_json(row) for row in translation.rows], indent=1) + "\n")
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    console.print(_table(translation.rows))
    counts = Counter(row.status for row in translation.rows)
    console.print(", ".join(f"{counts[status]} {status.value}" for status in Status if counts[status]), highlight=False)
    try:
        load_settings(output)
    except SettingsError as error:
        raise SettingsError(f"{output} is written, and a run would refuse it: {error}") from error
    console.print(f"wrote {output}: check model.path, then `april train {output} --dry-run`", highlight=False)


def _table(rows: list[Row]) -> Table:
    table = Table(show_lines=False, highlight=False)
    for name in ("verl", "value", "april", "", "reason"):
        table.add_column(name, overflow="fold")
    for row in sorted(rows, key=lambda r: list(Status).index(r.status)):
        settings = "\n".join(f"{n} = {_shown(v)}" for n, v in zip(row.settings, row.written, strict=True))
        key = row.key.replace("actor_rollout_ref.", "a_r_r.")
        table.add_row(
            *map(_plain, (key, str(row.value), settings)),
            f"[{COLOURS[row.status]}]{row.status.value}[/]",
            _plain(row.reason),
        )
    table.caption = "a_r_r is actor_rollout_ref"
    return table


def _plain(text: str) -> str:
    """Without markup: brackets in values are brackets."""
    return text.replace("[", "\\[")


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)


def _json(row: Row) -> dict[str, Any]:
    return {
        "verl": row.key or None,
        "value": row.value,
        "status": row.status.value,
        "settings": dict(zip(row.settings, row.written, strict=True)),
        "reason": row.reason,
    }
