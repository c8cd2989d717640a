"""The `april` command. Each subcommand imports what it needs when it runs, so that `--help` is quick."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import click

from deploy.buffer_commands import buffer_group
from deploy.console import configure_logging, run_reporting_errors
from deploy.data_commands import data_group
from deploy.from_verl import from_verl
from deploy.report_command import report
from deploy.toml import toml_text
from deploy.top.command import top
from deploy.tuning_commands import calibrate, simulate, trace_group, tune
from protocol.settings import RunSettings, dump_settings, iter_fields, load_settings, settings_without_effect

LOG = logging.getLogger("april")

OVERRIDES: dict[str, Any] = {"ignore_unknown_options": True, "allow_interspersed_args": True}
JSON_FILE = click.Path(path_type=Path, dir_okay=False, writable=True)


@click.group()
@click.version_option(package_name="april-rollout")
def main() -> None:
    """Rollouts for RL of language models that don't wait for the long tail."""


def _show_settings(context: click.Context, _: click.Parameter, shown: bool) -> None:
    if shown:
        for setting in iter_fields():
            click.echo(f"{setting.name} = {_shown(setting.default)}    ({setting.kind})\n    {setting.help}")
        context.exit()


def _shown(default: Any) -> str:
    if default is None:
        return "not set"
    return json.dumps(default, default=lambda value: str(getattr(value, "value", value)))


def run_command(function: Any) -> Any:
    """What `serve` and `train` share: RUN.toml, overrides, --dry-run, --list-settings."""
    function = click.option(
        "--list-settings",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show_settings,
        help="List every setting with what it does, and exit.",
    )(function)
    function = click.option("--dry-run", is_flag=True, help="Print the resolved settings as TOML and exit.")(function)
    function = click.argument("overrides", nargs=-1, metavar="[--section.field=value]...")(function)
    return click.argument("run_toml", type=click.Path(path_type=Path), metavar="RUN.toml")(function)


@main.command(context_settings=OVERRIDES)
@run_command
def serve(run_toml: Path, overrides: tuple[str, ...], dry_run: bool) -> None:
    """Run the rollout service that RUN.toml describes, until SIGTERM."""

    def work() -> None:
        settings = load_settings(run_toml, overrides)
        if not _dry(settings, dry_run):
            from rollout_service.main import serve as run_service

            configure_logging(settings)
            for sentence in settings_without_effect(settings):
                LOG.warning("%s", sentence)
            run_service(settings)

    run_reporting_errors(work)


@main.command(context_settings=OVERRIDES)
@click.option("--nproc", default=1, show_default=True, type=click.IntRange(1), help="Ranks on this machine.")
@click.option("--hostfile", type=click.Path(path_type=Path), help="Machines and their slots, for DeepSpeed's launcher.")
@run_command
def train(run_toml: Path, overrides: tuple[str, ...], dry_run: bool, nproc: int, hostfile: Path | None) -> None:
    """Train the policy that RUN.toml describes, on batches of the rollout service."""

    def work() -> None:
        settings = load_settings(run_toml, overrides)
        if _dry(settings, dry_run):
            return
        if nproc > 1 or hostfile:
            from deploy.launch_ranks import launch

            sys.exit(launch(nproc, hostfile, run_toml, overrides))
        from trainer.threads import wait_passively

        wait_passively()
        from trainer.main import train as run_training
        from trainer.stopping import stop_no_more

        configure_logging(settings)
        run_training(settings)
        stop_no_more()

    run_reporting_errors(work)


@main.command(context_settings=OVERRIDES)
@click.option("--json", "json_file", type=JSON_FILE, help="Write the summary as JSON.")
@click.option("--dir", "run_dir", type=click.Path(path_type=Path), help="Folder of the run [default: runs/demo-TIME].")
@click.argument("overrides", nargs=-1, metavar="[--section.field=value]...")
def demo(overrides: tuple[str, ...], json_file: Path | None, run_dir: Path | None) -> None:
    """The whole loop on this machine: Redis, service and trainer as separate processes, a small policy."""

    def work() -> None:
        from deploy.demo.launch import run_demo

        configure_logging()
        run_demo(run_dir, overrides, json_file)

    run_reporting_errors(work)


@main.command(context_settings=OVERRIDES)
@click.option("--json", "json_file", type=JSON_FILE, help="Write the findings as JSON.")
@click.option("--skip-engine", is_flag=True, help="Don't start the engine to compare log-probs.")
@click.argument("run_toml", type=click.Path(path_type=Path), metavar="RUN.toml")
@click.argument("overrides", nargs=-1, metavar="[--section.field=value]...")
def doctor(run_toml: Path, overrides: tuple[str, ...], json_file: Path | None, skip_engine: bool) -> None:
    """Check settings, engine, log-prob mode, Redis policy, disk and versions before a run."""

    def work() -> None:
        from deploy.doctor import examine

        sys.exit(examine(load_settings(run_toml, overrides), json_file, not skip_engine))

    run_reporting_errors(work)


main.add_command(buffer_group)
main.add_command(data_group)
main.add_command(from_verl)
main.add_command(simulate)
main.add_command(tune)
main.add_command(calibrate)
main.add_command(trace_group)
main.add_command(top)
main.add_command(report)


def _dry(settings: RunSettings, dry_run: bool) -> bool:
    if dry_run:
        click.echo(toml_text(dump_settings(settings)), nl=False)
        for sentence in settings_without_effect(settings):
            click.echo(f"april: warning: {sentence}", err=True)
    return dry_run


if __name__ == "__main__":
    main()
