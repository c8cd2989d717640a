"""`april top`."""

import asyncio
import json
import sys
from pathlib import Path

import click

from deploy.console import run_reporting_errors


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True})
@click.option("--once", is_flag=True, help="Print one snapshot as text and exit; so does output that is no terminal.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="Write the status and the pictures as JSON, print the snapshot, and exit.",
)
@click.option("--control", is_flag=True, help="Let the key p pause and resume the service; else nothing is changed.")
@click.argument("target", required=False, metavar="[URL|RUN.toml]")
@click.argument("overrides", nargs=-1, metavar="[--section.field=value]...")
def top(target: str | None, overrides: tuple[str, ...], once: bool, json_file: Path | None, control: bool) -> None:
    """Watch a running service in this terminal: what limits it, its round, engines, tail, buffer, lag, events."""

    def work() -> None:
        from deploy.top.target import find_target
        from deploy.top.watcher import snapshot, watch
        from rollout_service.tuning.report_files import check_outputs, write_report

        named = target is not None and not target.startswith("--")
        found = find_target(target if named else None, overrides if named or target is None else (target, *overrides))
        if not (once or json_file) and sys.stdout.isatty():
            asyncio.run(watch(found, control))
            return
        check_outputs([json_file] if json_file else [], [])
        document = asyncio.run(snapshot(found))
        if json_file is not None:
            write_report(json_file, (json.dumps(document, indent=2) + "\n").encode())

    run_reporting_errors(work)
