"""`april data`: make Parquet of questions and answers, and see what a run would read before it reads it."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deploy.console import run_reporting_errors
from protocol.errors import DataError
from protocol.settings import RunSettings, load_settings

OVERRIDES: dict[str, Any] = {"ignore_unknown_options": True, "allow_interspersed_args": True}
FILE = click.Path(path_type=Path, dir_okay=False)
FILE_WIDTH = 160  # columns of the tables where no terminal says how many there are
MAX_SHOWN_CHARS = 4000  # of the example; a prompt of books would scroll the tables away


@click.group(name="data")
def data_group() -> None:
    """Convert prompts, and look at what a run reads."""


@data_group.command()
@click.argument("inputs", nargs=-1, required=True, type=FILE, metavar="FILE...")
@click.option("--out", "output", required=True, type=FILE, help="Parquet file to write.")
@click.option("--prompt-column", help="Column of the question [default: GSM8K's format].")
@click.option("--answer-column", help="Column of the right answer.")
@click.option("--data-source", help="Name of the task [default: the file's name; GSM8K: openai/gsm8k].")
@click.option("--split", default="train", show_default=True, help="Kept in extra_info.")
@click.option("--instruction", help="Text appended to every question, such as how to mark the answer.")
@click.option("--system-prompt", help="System message in front of every question.")
@click.option("--force", is_flag=True, help="Overwrite the output.")
def convert(inputs: tuple[Path, ...], output: Path, force: bool, **how: Any) -> None:
    """Questions and answers (JSONL, CSV, TSV) to Parquet with verl's columns."""

    def work() -> None:
        from rollout_service.prompts.convert import Conversion
        from rollout_service.prompts.convert import convert as write

        click.echo(f"{output}: {write(inputs, output, Conversion(**how), force)} prompts")

    run_reporting_errors(work)


@data_group.command(context_settings=OVERRIDES)
@click.option("--json", "json_file", type=FILE, help="Write the report as JSON.")
@click.argument("run_toml", type=click.Path(path_type=Path), metavar="RUN.toml")
@click.argument("overrides", nargs=-1, metavar="[--section.field=value]...")
def inspect(run_toml: Path, overrides: tuple[str, ...], json_file: Path | None) -> None:
    """What a run reads: prompts and lengths by data source, weights in force, repeats, an example, readable labels."""
    run_reporting_errors(lambda: _inspect(load_settings(run_toml, overrides), json_file))


def _inspect(settings: RunSettings, json_file: Path | None) -> None:
    """Report first and complain last: a fault is easier to mend with the numbers before one's eyes."""
    from rollout_service.prompts.load import make_prompts, read_data
    from rollout_service.prompts.survey import survey_data
    from rollout_service.rewards.labels import check_labels

    read = read_data(settings)
    fault: DataError | None = None
    prompts = None
    try:
        prompts = make_prompts(read, settings)
        check_labels([*prompts.train, *prompts.validation], settings)
    except DataError as error:
        fault = error
    survey = asdict(survey_data(read, prompts, settings))
    _print(survey, settings)
    if json_file:
        json_file.write_text(json.dumps(survey | {"fault": str(fault) if fault else None}, indent=2) + "\n")
    if fault:
        raise fault


def _print(survey: dict[str, Any], settings: RunSettings) -> None:
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
    console.print(_table("Training prompts", survey["train"], served=True))
    if survey["validation"]:
        console.print(_table("Held-out prompts", survey["validation"], served=False))
    if survey["repeats"]:
        console.print(_repeats(survey["repeats"]), highlight=False)
    if len(survey["train"]) > 1 and not survey["weights"]:
        sizes = ", ".join(f"{json.dumps(s['data_source'])} = {s['num_used']}" for s in survey["train"])
        console.print(f"no weights: sources come by their size, as with\nsource_weights = {{ {sizes} }}", markup=False)
    if survey["example"]:
        _print_example(console, survey["example"], settings)


def _table(title: str, sources: list[dict[str, Any]], served: bool) -> Table:
    table = Table(title=title)
    shares = ("share", "times an epoch") if served else ()
    counts = ("rows", "used", "filtered", "cut", "too long", "p50", "p90", "p99", "longest")
    for column in ("data source", *counts, *shares):
        table.add_column(column, justify="left" if column == "data source" else "right")
    for source in sources:
        numbers = [
            str(source[name])
            for name in (
                *("num_rows", "num_used", "num_filtered", "num_truncated", "num_refused"),
                *("p50_tokens", "p90_tokens", "p99_tokens", "max_tokens"),
            )
        ]
        numbers += [_share(source["share"]), _times(source["times_served"])] if served else []
        table.add_row(escape(source["data_source"]), *numbers)
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _repeats(repeats: dict[str, int]) -> str:
    return (
        f"{repeats['num_repeated']} training prompts repeat an earlier one, {repeats['num_contradictory']} of them "
        f"with another right answer; {repeats['num_held_out']} held-out prompts also occur in training"
    )


def _print_example(console: Console, example: dict[str, Any], settings: RunSettings) -> None:
    template = "through the chat template" if settings.data.apply_chat_template else "without a chat template"
    text = example["text"]
    shown = text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}… ({len(text)} characters)"
    label = json.dumps(example["ground_truth"], ensure_ascii=False)
    console.rule(f"{escape(example['prompt_id'])}, {template}, {example['num_tokens']} tokens")
    console.print(shown, markup=False, highlight=False, soft_wrap=True)
    console.rule("its right answer")
    console.print(label[:MAX_SHOWN_CHARS], markup=False, highlight=False, soft_wrap=True)
