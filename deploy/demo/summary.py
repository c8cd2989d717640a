"""What a demo reports: one table for people, the same as JSON for programs."""

from pydantic import BaseModel, ConfigDict
from rich.table import Table

from protocol.messages import Ledger, Status


class Processes(BaseModel):
    """Process ids; three different ones."""

    model_config = ConfigDict(extra="forbid")
    service: int
    trainer: int
    redis: int


class DemoSummary(BaseModel):
    """Figures of a finished demo."""

    model_config = ConfigDict(extra="forbid")
    steps: int
    wall_s: float
    eval_reward_before: float | None
    eval_reward_after: float | None
    groups_consumed: int
    samples_trained: int
    samples_resumed: int
    samples_multi_version: int
    tokens_generated: int
    tokens_trained: int
    off_policy_token_share: float
    mean_lag: float
    max_lag: int
    surplus_groups_kept: int
    ledger: Ledger
    ledger_error: int
    processes: Processes


def summary_table(summary: DemoSummary) -> Table:
    """The figures with a word on each."""
    table = Table(title="april demo", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    before, after = summary.eval_reward_before, summary.eval_reward_after
    rows: list[tuple[str, str]] = [
        ("optimizer steps", str(summary.steps)),
        ("held-out reward", f"{_number(before)} → {_number(after)}"),
        ("groups consumed", str(summary.groups_consumed)),
        ("samples trained", str(summary.samples_trained)),
        ("  of these resumed at least once", str(summary.samples_resumed)),
        ("  written by several policy versions", str(summary.samples_multi_version)),
        ("tokens generated / trained", f"{summary.tokens_generated:,} / {summary.tokens_trained:,}"),
        ("trained tokens older than the step (lookahead 1: most)", f"{summary.off_policy_token_share:.1%}"),
        ("lag of trained tokens, mean / max", f"{summary.mean_lag:.2f} / {summary.max_lag}"),
        ("surplus groups kept", str(summary.surplus_groups_kept)),
        ("ledger", _ledger(summary.ledger)),
        ("ledger error", str(summary.ledger_error)),
        ("process ids", _processes(summary.processes)),
        ("wall time", f"{summary.wall_s:.0f} s"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def live_line(status: Status) -> str:
    """Progress while the demo runs."""
    metrics = status.trainer_metrics
    shown = [f"step {status.trained_step}", f"policy v{status.active_version}"]
    if "reward/mean" in metrics:
        shown.append(f"reward {metrics['reward/mean']:.2f}")
    shown += [f"{count} {state.value}" for state, count in status.samples.items() if count]
    return " · ".join(shown + list(status.waits))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _ledger(ledger: Ledger) -> str:
    states = ("open", "ready", "leased", "consumed", "dropped")
    return f"{ledger.admitted} admitted = " + " + ".join(f"{getattr(ledger, s)} {s}" for s in states)


def _processes(processes: Processes) -> str:
    return f"service {processes.service}, trainer {processes.trainer}, redis {processes.redis}"
