"""What a run under faults came to, as tables that say which promise was kept and by what that was judged."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.support.history import Verdict
from tests.support.journal import Record
from tests.support.recovery import Recovery

MAX_SHOWN = 20  # violations; the first ones tell what is wrong

LEGEND = (
    "Survived: a step was trained after it. Back: from the end of the fault to the next trained step, where no other "
    "fault came before that."
)


@dataclass
class Report:
    """Faults, verdicts and numbers of one run."""

    seed: int
    seconds: float
    faults: Counter[str]
    recoveries: dict[str, Recovery]
    step_s: float | None
    start_s: float | None
    verdicts: list[Verdict]
    final: Record = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    @property
    def violations(self) -> list[Any]:
        """Of all promises."""
        return [violation for verdict in self.verdicts for violation in verdict.violations]

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "seed": self.seed,
            "seconds": self.seconds,
            "num_faults": self.faults.total(),
            "undisturbed_step_s": self.step_s,
            "service_start_s": self.start_s,
            "faults": {
                name: {
                    "times": r.times,
                    "survived": r.survived,
                    "median_s": r.median_s,
                    "max_s": max(r.alone_s, default=None),
                }
                for name, r in self.recoveries.items()
            },
            "promises": {
                v.promise: {"verdict": v.word, "seen": v.seen, "violations": [str(x) for x in v.violations]}
                for v in self.verdicts
            },
            "numbers": self.numbers,
            "ledger": self.final.get("ledger", {}),
        }


def show(report: Report, console: Console) -> None:
    """Print the report."""
    console.print(_faults(report))
    known = {"a step takes": report.step_s, "a start of the service": report.start_s}
    usual = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in known.items() if seconds is not None)
    console.print(LEGEND + (f" Without faults {usual}." if usual else "") + "\n", highlight=False, style="dim")
    console.print(_promises(report.verdicts))
    console.print(_numbers(report))
    for violation in report.violations[:MAX_SHOWN]:
        console.print(str(violation), style="red", markup=False)
    console.print(summary(report), style="bold red" if report.violations else "bold green", highlight=False)


def summary(report: Report) -> str:
    """The run in one sentence."""
    words = Counter(verdict.word for verdict in report.verdicts)
    unseen = [v.promise for v in report.verdicts if v.word == "not observed"]
    sentence = f"{report.faults.total()} faults, {words['kept']} promises kept, {words['BROKEN']} broken"
    return sentence + (f"; not observed in this run: {', '.join(unseen)}" if unseen else "")


def _faults(report: Report) -> Table:
    table = Table(title=f"Faults (seed {report.seed}, {report.seconds:.0f} s)", title_justify="left")
    for name, justify in (("fault", "left"), ("times", "right"), ("survived", "right")):
        table.add_column(name, justify=justify)
    table.add_column("back after, median s", justify="right")
    table.add_column("at the most", justify="right")
    for name, recovery in report.recoveries.items():
        most = f"{max(recovery.alone_s):.1f}" if recovery.alone_s else "-"
        median = f"{recovery.median_s:.1f}" if recovery.median_s is not None else "-"
        table.add_row(name, str(recovery.times), str(recovery.survived), median, most)
    times = sum(r.times for r in report.recoveries.values())
    survived = sum(r.survived for r in report.recoveries.values())
    table.add_row("all, crashes at places included", str(times), str(survived), "", "", style="bold")
    return table


def _promises(verdicts: Sequence[Verdict]) -> Table:
    table = Table(
        "promise", "verdict", "violations", "judged by", title="Promises (docs/guarantees.md)", show_lines=True
    )
    table.title_justify = "left"
    styles = {"kept": "green", "BROKEN": "bold red", "not observed": "yellow"}
    for verdict in verdicts:
        seen = "\n".join(f"{count:,} {what}" for what, count in sorted(verdict.seen.items()))
        word = f"[{styles[verdict.word]}]{verdict.word}[/]"
        table.add_row(f"{verdict.promise}: {verdict.text}", word, str(len(verdict.violations)), seen)
    return table


def _numbers(report: Report) -> Table:
    table = Table("what came of it", "", title="Numbers", title_justify="left")
    for name, number in report.numbers.items():
        table.add_row(name, f"{number:,}")
    if report.final:
        table.add_row("steps in the surviving history", f"{len(report.final['history']):,}")
        for name, count in report.final["ledger"].items():
            table.add_row(f"groups {name}", f"{count:,}")
    return table
