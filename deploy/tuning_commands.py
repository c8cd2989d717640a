"""`april simulate`, `tune`, `calibrate` and `trace`: what ratio, policy and lookahead to take, and why.

Always true: none of them touches a running service or its Redis; what they read is a trace, and what they write is a
report in a file that was named.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from deploy.console import run_reporting_errors
from deploy.tuning_options import DEFAULT_RATIOS, Choices, Finite, Numbers
from protocol.errors import SettingsError
from protocol.samples import MAX_GROUP_SAMPLES
from protocol.settings import load_settings
from protocol.settings.rollout import Admission, RoundOrder

if TYPE_CHECKING:
    from rollout_service.tuning.lengths import LengthSource
    from rollout_service.tuning.sweep import Point, PointResult, Scenario
    from rollout_service.tuning.trace_scenario import Given, Known, Prepared

OVERRIDES: dict[str, Any] = {"ignore_unknown_options": True, "allow_interspersed_args": True}
FILE = click.Path(path_type=Path, dir_okay=False)
TUNED_RATIOS = "1,1.1,1.25,1.5,1.75,2,2.5,3"
TUNED_LOOKAHEADS = (0, 1)
MAX_GROUPS = 100_000  # a batch of millions of responses: more than is trained on at once
MAX_ROUNDS = 1_000_000  # errors of a thousandth
MAX_PROCESSES = 1024
MAX_RATIO = 1000  # as the settings have it
MAX_LOOKAHEAD = 64  # the lag grows with it, and the rounds until the buffer is as full as it will be
LONGEST_S = 1e6  # eleven days for one step
TUNE_ROUNDS = 300  # a point's throughput is then known to about 1 %


def _scenario_options(function: Any) -> Any:
    options = (
        click.option("--lengths-csv", type=FILE, help="CSV file whose column --lengths-column has the lengths."),
        click.option("--lengths-column", help="Column of response lengths in tokens."),
        click.option("--prompt-column", help="Column of prompt lengths in tokens."),
        click.option("--lengths", help="A list of lengths, a trace, or a distribution: lognormal:median=200,sigma=1."),
        click.option(
            "--groups", type=click.IntRange(1, MAX_GROUPS), help="N, prompts of a batch [default: the run's, else 16]."
        ),
        click.option(
            "--samples",
            type=click.IntRange(1, MAX_GROUP_SAMPLES),
            help="n, samples of a prompt [default: the run's, else 8].",
        ),
        click.option("--slots", type=click.IntRange(1), help="Sequences that all engines decode at once."),
        click.option("--max-lag", type=click.IntRange(0), help="Lag bound [default: the run's, else none that binds]."),
        click.option(
            "--trainer-s", type=Finite(0, LONGEST_S), help="Seconds of a trainer's step [default: the trace's]."
        ),
        click.option("--install-s", type=Finite(0, LONGEST_S), help="Seconds of an install [default: the trace's]."),
        click.option("--engine", type=FILE, help="Engine model that `april calibrate` wrote."),
        click.option("--kv-tokens", type=click.IntRange(0), help="Tokens that the KV cache holds; 0 is no bound."),
        click.option("--processes", type=click.IntRange(1, MAX_PROCESSES), help="Processes [default: one a core]."),
        click.option("--json", "json_file", type=FILE, help="Write the report as JSON."),
    )
    for option in reversed(options):
        function = option(function)
    return function


@click.command(context_settings=OVERRIDES)
@click.argument("source", required=False, metavar="[RUN]")
@click.argument("overrides", nargs=-1, metavar="[--section.field=value]...")
@click.option(
    "--ratios", type=Numbers(1, MAX_RATIO), default=DEFAULT_RATIOS, show_default=True, help="Ratios to simulate."
)
@click.option("--policies", type=Choices(Admission), help="Admission policies [default: the run's, else fixed].")
@click.option("--orders", type=Choices(RoundOrder), help="Orders within a round [default: the run's, else fifo].")
@click.option(
    "--lookaheads", type=Numbers(0, MAX_LOOKAHEAD, whole=True), help="Lookaheads [default: the run's, else 0]."
)
@click.option(
    "--rounds", type=click.IntRange(4, MAX_ROUNDS), default=2000, show_default=True, help="Rounds of each point."
)
@click.option("--png", type=FILE, help="Write the plot of throughput against off-policy share.")
@click.option("--html", type=FILE, help="Write plot and table as one page.")
@_scenario_options
def simulate(source: str | None, overrides: tuple[str, ...], **options: Any) -> None:
    """What-if: throughput, off-policy share and lag for a list of ratios.

    RUN is a RUN.toml, a run's folder or a trace; without it, give lengths by --lengths-csv or --lengths.
    """

    def work() -> None:
        prepared = _prepare(source, overrides, options)
        lookahead = prepared.limits.lookahead if prepared.limits else 0
        points = _points(prepared, options, options["ratios"], (lookahead,))
        results = _sweep(prepared.scenario, points, options["rounds"], options["processes"])
        _report(prepared, results, options, "What-if")

    run_reporting_errors(work)


@click.command(context_settings=OVERRIDES)
@click.argument("source", required=False, metavar="[RUN]")
@click.argument("overrides", nargs=-1, metavar="[--section.field=value]...")
@click.option("--ratios", type=Numbers(1, MAX_RATIO), default=TUNED_RATIOS, show_default=True, help="Ratios to try.")
@click.option("--policies", type=Choices(Admission), help="Policies to try [default: the run's, else fixed].")
@click.option("--orders", type=Choices(RoundOrder), help="Orders to try [default: the run's, else fifo].")
@click.option(
    "--lookaheads", type=Numbers(0, MAX_LOOKAHEAD, whole=True), help="Lookaheads to try [default: 0, 1 and the run's]."
)
@click.option(
    "--rounds", type=click.IntRange(40, MAX_ROUNDS), default=TUNE_ROUNDS, show_default=True, help="Rounds of a point."
)
@click.option("--max-off-policy-share", type=Finite(0, 1), help="Largest share of off-policy tokens.")
@click.option("--max-mean-lag", type=Finite(0, MAX_RATIO), help="Largest mean lag of trained tokens.")
@click.option("--allow-preemption", is_flag=True, help="Also take what makes the engine preempt.")
@click.option("--png", type=FILE, help="Write the plot of throughput against off-policy share.")
@click.option("--html", type=FILE, help="Write plot and table as one page.")
@_scenario_options
def tune(source: str | None, overrides: tuple[str, ...], **options: Any) -> None:
    """Recommend ratio, policy and lookahead for a run from its trace, within limits; "1.0 is best here" is an answer.

    RUN is a RUN.toml, a run's folder or a trace; without it, give lengths by --lengths-csv or --lengths.
    """

    def work() -> None:
        from rollout_service.tuning.recommend import UserLimits, recommend

        prepared = _prepare(source, overrides, options, bootstrap=True)
        run = prepared.limits
        lookaheads = sorted({*TUNED_LOOKAHEADS, run.lookahead} if run else TUNED_LOOKAHEADS)
        points = _points(prepared, options, (*options["ratios"], *([run.ratio] if run else [])), lookaheads)
        limits = UserLimits(
            max_off_policy_share=options["max_off_policy_share"],
            max_mean_lag=options["max_mean_lag"],
            max_lag=prepared.scenario.max_lag,
            kv_room=not options["allow_preemption"],
        )
        results = _sweep(prepared.scenario, points, options["rounds"], options["processes"])
        found = recommend(results, limits, _full(prepared.scenario).ceiling_tokens_per_s)
        _report(prepared, results, options, "Tuning", found)

    run_reporting_errors(work)


@click.command(context_settings=OVERRIDES)
@click.argument("source", metavar="RUN")
@click.argument("overrides", nargs=-1, metavar="[--section.field=value]...")
@click.option("--json", "json_file", type=FILE, help="Where to write [default: calibration.json in the run's folder].")
def calibrate(source: str, overrides: tuple[str, ...], json_file: Path | None) -> None:
    """Fit the engine model: by starting the engine of RUN.toml for a minute, or from the trace of a run's folder."""

    def work() -> None:
        from deploy.tuning_tables import print_calibration
        from rollout_service.tuning.calibrate import calibrate_engine
        from rollout_service.tuning.report_files import check_outputs, make_folder
        from rollout_service.tuning.trace_reader import read_trace
        from rollout_service.tuning.trace_scenario import CALIBRATION_FILE, calibration_of_trace, folder_of, write_json

        if source.endswith(".toml"):
            settings = load_settings(Path(source), overrides)
            file = json_file or make_folder(settings.run_dir) / CALIBRATION_FILE
            check_outputs([file], [Path(source)])
            found = asyncio.run(calibrate_engine(settings, Console(stderr=True).print))
        else:
            _no_overrides(overrides)
            trace = read_trace(Path(source))
            file = json_file or folder_of(Path(source)) / CALIBRATION_FILE
            check_outputs([file], [Path(source)])
            found = calibration_of_trace(trace)
        print_calibration(found)
        write_json(file, found.to_json())
        click.echo(f"written to {file}; `april simulate` and `april tune` read it by --engine, or from RUN's folder")

    run_reporting_errors(work)


@click.group(name="trace")
def trace_group() -> None:
    """What a run has written down about its samples and rounds."""


@trace_group.command(name="stats")
@click.argument("source", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "json_file", type=FILE, help="Write the report as JSON.")
def trace_stats(source: Path, json_file: Path | None) -> None:
    """Lengths with the unfinished ones counted right, rewards by length, stragglers, times."""

    def work() -> None:
        from deploy.tuning_tables import print_statistics
        from rollout_service.tuning.lengths_stats import trace_statistics
        from rollout_service.tuning.report_files import check_outputs
        from rollout_service.tuning.trace_reader import read_trace
        from rollout_service.tuning.trace_scenario import write_json

        check_outputs([json_file] if json_file else [], [source])
        statistics = trace_statistics(read_trace(source))
        print_statistics(statistics)
        if json_file:
            write_json(json_file, statistics.to_json())

    run_reporting_errors(work)


@trace_group.command(name="convert")
@click.argument("source", metavar="IN")
@click.argument("out", metavar="OUT.jsonl", type=FILE)
@click.option("--lengths-column", help="Column of response lengths, for a CSV file.")
@click.option("--prompt-column", help="Column of prompt lengths, for a CSV file.")
@click.option(
    "--prompts", default=1000, show_default=True, type=click.IntRange(1, MAX_GROUPS), help="Prompts of a distribution."
)
@click.option(
    "--samples",
    default=8,
    show_default=True,
    type=click.IntRange(1, MAX_GROUP_SAMPLES),
    help="Samples of each of them.",
)
def trace_convert(
    source: str, out: Path, lengths_column: str | None, prompt_column: str | None, prompts: int, samples: int
) -> None:
    """Make a trace of a list of lengths, a CSV column, or a distribution such as lognormal:median=200,sigma=1."""

    def work() -> None:
        from rollout_service.tuning.report_files import check_outputs, write_report
        from rollout_service.tuning.trace_convert import converted, is_trace, read_lengths

        if out.suffix != ".jsonl":
            raise SettingsError(f"{out} would not be read as a trace: name it {out.with_suffix('.jsonl').name}")
        if is_trace(Path(source)):
            raise SettingsError(f"{source} is a trace already: simulate, tune and trace stats read it as it is")
        check_outputs([out], [Path(source)])
        lengths = read_lengths(source, lengths_column, prompt_column)
        lines = [line.model_dump_json() for line in converted(lengths, prompts, samples)]
        write_report(out, ("\n".join(lines) + "\n").encode())
        click.echo(f"{len(lines) - 1} lengths of {lengths.name} in {out}")

    run_reporting_errors(work)


# What they share


def _prepare(
    source: str | None, overrides: tuple[str, ...], options: dict[str, Any], bootstrap: bool = False
) -> "Prepared":
    from dataclasses import replace

    from rollout_service.tuning.report_files import check_outputs
    from rollout_service.tuning.trace_scenario import prepare

    if source is not None and source.startswith("--"):
        source, overrides = None, (source, *overrides)
    read = [Path(name) for name in (source, options["lengths_csv"], options["lengths"], options["engine"]) if name]
    check_outputs([path for name in ("json_file", "png", "html") if (path := options[name])], read)
    known, lengths = _known(source, overrides), _lengths(source, options)
    prepared = prepare(known, lengths, _given(options))
    return replace(prepared, scenario=replace(prepared.scenario, bootstrap=bootstrap))


def _known(source: str | None, overrides: tuple[str, ...]) -> "Known":
    from rollout_service.tuning.trace_scenario import Known, known_of_settings, known_of_trace

    if source is not None and source.endswith(".toml"):
        return known_of_settings(load_settings(Path(source), overrides))
    _no_overrides(overrides)
    if source is None or source.endswith((".csv", ".txt")):
        return Known()
    return known_of_trace(Path(source))


def _no_overrides(overrides: tuple[str, ...]) -> None:
    if overrides:
        raise SettingsError(f"{overrides[0]} is no option of this command, and settings are only read with a RUN.toml")


def _lengths(source: str | None, options: dict[str, Any]) -> "LengthSource | None":
    from rollout_service.tuning.trace_convert import read_lengths

    csv_file, spec = options["lengths_csv"], options["lengths"]
    if csv_file is not None and spec is not None:
        raise SettingsError("--lengths-csv and --lengths both say how long responses are: give one of them")
    named = str(csv_file) if csv_file is not None else spec
    if named is None and source is not None and source.endswith((".csv", ".txt")):
        named = source
    return None if named is None else read_lengths(named, options["lengths_column"], options["prompt_column"])


def _given(options: dict[str, Any]) -> "Given":
    from rollout_service.tuning.trace_scenario import Given

    names = ("groups", "samples", "slots", "max_lag", "trainer_s", "install_s", "engine", "kv_tokens")
    return Given(**{name: options[name] for name in names})


def _points(
    prepared: "Prepared", options: dict[str, Any], ratios: Sequence[float], lookaheads: Sequence[float]
) -> "list[Point]":
    from rollout_service.tuning.sweep import Point

    run = prepared.limits
    policies = options["policies"] or ((run.admission,) if run else ("fixed",))
    orders = options["orders"] or ((run.order,) if run else ("fifo",))
    chosen = options["lookaheads"] or lookaheads
    points = [
        Point(ratio, Admission(policy), RoundOrder(order), int(lookahead))
        for policy in policies
        for order in orders
        for lookahead in chosen
        for ratio in sorted({1.0, *ratios})
    ]
    bound = prepared.scenario.max_lag
    return points if bound is None else _within_lag(points, bound)


def _within_lag(points: "list[Point]", max_lag: int) -> "list[Point]":
    from protocol.settings import smallest_max_lag

    kept = [p for p in points if smallest_max_lag(p.ratio, p.lookahead) <= max_lag]
    if len(kept) < len(points):
        left_out = sorted({(p.lookahead, p.ratio) for p in points if p not in kept})
        shown = ", ".join(f"{ratio:g} with lookahead {lookahead}" for lookahead, ratio in left_out)
        click.echo(f"max_lag = {max_lag} leaves out the ratios {shown}", err=True)
    if not kept:
        least = min(smallest_max_lag(p.ratio, p.lookahead) for p in points)
        raise SettingsError(
            f"--max-lag {max_lag} is too small for all of them, the least is {least}: lower the lookahead"
        )
    return kept


def _sweep(scenario: "Scenario", points: "list[Point]", rounds: int, processes: int | None) -> "list[PointResult]":
    from deploy.tuning_progress import part_progress
    from rollout_service.tuning.sweep import NUM_PARTS, sweep

    with part_progress(f"simulating {rounds} rounds each", len(points) * NUM_PARTS) as part_done:
        done = {result.point: result for result in sweep(scenario, points, rounds, processes, part_done)}
    return [done[point] for point in points]


def _full(scenario: "Scenario") -> Any:
    from rollout_service.tuning.closed_forms import draw_prompts, full_engine

    prompts = draw_prompts(scenario.lengths.workload(0, bootstrap=False), scenario.group_samples)
    return full_engine(scenario.engine, prompts, scenario.batch_groups)


def _report(
    prepared: "Prepared", results: "list[PointResult]", options: dict[str, Any], title: str, found: Any = None
) -> None:
    from deploy.tuning_tables import print_points
    from rollout_service.tuning.plots import write_html, write_png
    from rollout_service.tuning.recommend import base_of, recommendation_json, recommendation_sentences
    from rollout_service.tuning.report import notes, point_row, scenario_row, share_sentences
    from rollout_service.tuning.trace_scenario import write_json

    scenario, full = prepared.scenario, _full(prepared.scenario)
    rows = [point_row(r, base_of(results), scenario, full.ceiling_tokens_per_s) for r in results]
    sentences = [*prepared.sources, *share_sentences(scenario, full, results), *notes(results, scenario)]
    if found is not None:
        sentences += recommendation_sentences(found)
    heading = f"{title}: {scenario.batch_groups} × {scenario.group_samples} samples a batch, {scenario.lengths.name}"
    print_points(heading, rows, sentences)
    if options["json_file"]:
        report: dict[str, Any] = {"scenario": scenario_row(scenario, full), "points": rows, "notes": sentences}
        if found is not None:
            report["recommendation"] = recommendation_json(found)
        write_json(options["json_file"], report)
    if options["png"]:
        write_png(rows, heading, options["png"])
    if options["html"]:
        write_html(rows, heading, sentences, options["html"])
