"""Tables of the commands that tune."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from rollout_service.tuning.calibration import Calibration, Stretch
from rollout_service.tuning.lengths_stats import TraceStatistics
from rollout_service.tuning.report import BY_LAG, OUTCOME, PRICE, cells

POOR_FIT = 0.15  # median error of the engine model: more than the differences between ratios that matter


def print_points(title: str, rows: Sequence[dict[str, Any]], sentences: Sequence[str]) -> None:
    """A sweep, one line for each point, and what there is to say of it."""
    console = Console()
    if len({row["order"] for row in rows}) == 1:  # then the order needs no place in every line
        title = f"{title}, order {rows[0]['order']}"
        rows = [{**row, "policy": row["admission"]} for row in rows]
    for name, columns in ((title, OUTCOME), ("Of each round", PRICE), ("Trained tokens by lag", BY_LAG)):
        table = Table(title=name, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for head, _, _ in columns:
            table.add_column(head, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*cells(row, columns))
        console.print(table)
    for sentence in sentences:
        console.print(sentence, soft_wrap=True, highlight=False, markup=False)


def print_calibration(found: Calibration) -> None:
    """The fitted numbers, how well they fit, and where they do not."""
    engine = found.engine
    table = Table(title=f"Engine model: {engine.slots} slots, KV cache of {engine.kv_tokens or 'unknown'} tokens")
    for name in ("a decode step", "for each sequence", "for each token of context", "a prefilled token"):
        table.add_column(name, justify="right")
    numbers = (
        engine.step_base_s,
        engine.step_per_sequence_s,
        engine.step_per_context_token_s,
        engine.prefill_per_token_s,
    )
    table.add_row(*(f"{number * 1e6:.4g} µs" for number in numbers))
    console = Console()
    console.print(table)
    console.print(
        f"fit over {len(found.stretches)} stretches: R² {found.r_squared:.4f}, median error {found.median_error:.1%}, "
        f"worst {found.worst_error:.1%}"
    )
    if found.median_error > POOR_FIT:
        console.print(
            "That is a poor fit: something else kept this machine busy, or shares the engine's cores; calibrate again "
            "when it is quiet, and take what is simulated with it as a rough guess."
        )
    worst = Table(title="Largest residuals (measured over predicted, minus one)")
    for name in ("residual", "seconds", "steps", "running", "context", "prefilled"):
        worst.add_column(name, justify="right")
    order = sorted(range(len(found.residuals)), key=lambda i: -abs(found.residuals[i]))
    for index in order[:5]:
        worst.add_row(f"{found.residuals[index]:+.1%}", *_stretch_cells(found.stretches[index]))
    console.print(worst)


def _stretch_cells(stretch: Stretch) -> list[str]:
    steps = max(stretch.steps, 1.0)
    numbers = (stretch.seconds, stretch.steps, stretch.running / steps, stretch.context / steps, stretch.prefilled)
    return [f"{number:.3g}" for number in numbers]


def print_statistics(found: TraceStatistics) -> None:
    """Lengths, rewards by length, stragglers, times."""
    console = Console()
    title = f"Lengths of {found.run}: {found.num_finished} finished, {found.num_unfinished} unfinished"
    lengths = Table(title=title)
    for name in ("share", "tokens", "band of 95 %"):
        lengths.add_column(name, justify="right")
    for q in found.quantiles:
        lengths.add_row(f"{q.share:.0%}", _shown(q.length), f"{_shown(q.lower)} … {_shown(q.upper)}")
    console.print(lengths)
    console.print(
        f"p99 / p50 = {_shown(found.tail)}; mean {found.mean_length:.1f} tokens (of the finished ones alone "
        f"{found.mean_finished:.1f}); trained {_shown(found.trained_mean)} against dispatched "
        f"{found.dispatched_mean:.1f}"
    )
    bins = Table(title="Rewards by length")
    for name in ("tokens", "responses", "mean reward", "ended by themselves"):
        bins.add_column(name, justify="right")
    for b in found.bins:
        bins.add_row(f"{b.shortest}–{b.longest}", str(b.num_samples), _shown(b.mean_reward), _shown(b.stop_share))
    console.print(bins)
    if found.stragglers:
        slow = Table(title="Prompts that are stragglers every time")
        for name in ("prompt", "data source", "seen", "longest, mean", "parked"):
            slow.add_column(name, justify="right")
        for s in found.stragglers:
            slow.add_row(s.prompt, s.source, str(s.times_seen), f"{s.mean_longest:.0f}", str(s.num_parks))
        console.print(slow)
    times = (
        ("a round", found.round_s),
        ("cut to offer", found.cut_to_offer_s),
        ("wait for a slot", found.waited_s),
        ("parked", found.parked_s),
        ("trainer's step", found.trainer_step_s),
        ("install", found.install_s),
    )
    shown = ", ".join(f"{name} {value:.3g} s" for name, value in times if value is not None)
    console.print(f"{found.num_rounds} rounds; medians: {shown or 'none known'}")
    for note in found.notes:
        console.print(note, soft_wrap=True, markup=False)


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
