"""The whole system under random faults: `python -m tests.system.chaos --seconds 60 --seed 1`.

Redis behind a proxy, the service on the simulated engine and scripted trainers run as processes, are killed, stopped,
cut off and started again, and write down what they see; afterwards a checker decides from the histories alone whether
each promise was kept (tests/support/history.py). Exit code 1 on a violation.

Always true: after the last fault the system must come to rest by itself: it trains some steps more, everything ends in
order, and only then is the history judged. What doesn't come to rest is a violation too.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deploy.demo.byte_model import make_tokenizer
from protocol.messages import Status
from tests.support.cluster import System, Watcher, open_system
from tests.support.history import Violation, check
from tests.support.journal import Record, read_history
from tests.support.nemesis import Nemesis
from tests.support.scripted_trainer import FENCED_EXIT

STEPS_AFTERWARDS = 4
REST_PATIENCE_S = 120.0
SUPERVISE_EVERY_S = 0.05
RECOVERY_S = 30.0


@dataclass
class Report:
    """What a run under faults came to."""

    seed: int
    seconds: float
    faults: Counter[str]
    ends: Counter[str]
    violations: list[Violation]
    final: Record = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)


def run_chaos(folder: Path, tokenizer: Path, seed: int, seconds: float, num_faults: int | None) -> Report:
    """Faults for `seconds`, or until there were `num_faults`; then rest, and judgement."""
    with open_system(folder, tokenizer) as system:
        nemesis = Nemesis(system, seed)
        system.start_service()
        system.start_trainer()
        watcher = Watcher(system)
        watcher.start()
        began = time.monotonic()
        try:
            system.until(lambda s: s.trained_step >= 1)
            _strike(system, nemesis, began + seconds, num_faults)
            problems = _come_to_rest(system, nemesis)
        finally:
            watcher.end()
        problems += _end(system)
        system.record_final()
        records, batches = read_history(system.history_folder)
        violations = problems + check(records, batches)
        final = next((record for record in records if record["kind"] == "final"), {})
        took_s = time.monotonic() - began
        return Report(seed, took_s, nemesis.done, system.counts, violations, final, _numbers(records))


def _strike(system: System, nemesis: Nemesis, until_s: float, num_faults: int | None) -> None:
    while nemesis.num_done < num_faults if num_faults else time.monotonic() < until_s:
        if nemesis.lets_recover():
            _recover(system, nemesis)
        _supervise(system, nemesis, nemesis.pause_s())
        nemesis.strike()


def _recover(system: System, nemesis: Nemesis) -> None:
    """Until a step is trained after now; not for ever, since a process may fail at its named place again and again."""
    deadline, before = time.monotonic() + RECOVERY_S, None
    while time.monotonic() < deadline:
        _supervise(system, nemesis, SUPERVISE_EVERY_S)
        status = system.status()
        if status is None:
            continue
        before = status.trained_step if before is None else min(before, status.trained_step)
        if status.trained_step > before:
            return


def _supervise(system: System, nemesis: Nemesis, for_s: float) -> None:
    deadline = time.monotonic() + for_s
    while True:
        system.supervise(nemesis.arm)
        if time.monotonic() >= deadline:
            return
        time.sleep(SUPERVISE_EVERY_S)


def _come_to_rest(system: System, nemesis: Nemesis) -> list[Violation]:
    """No more faults: the system must go on by itself."""
    nemesis.armed = False
    deadline = time.monotonic() + REST_PATIENCE_S
    goal: int | None = None
    status: Status | None = None
    while time.monotonic() < deadline:
        _supervise(system, nemesis, SUPERVISE_EVERY_S)
        status = system.status() or status
        if status is None:
            continue
        goal = goal or status.durable_step + STEPS_AFTERWARDS
        if status.durable_step >= goal:
            return []
    waits = status.waits if status else ["the service does not answer"]
    tail = system.service.tail(12) if system.service else ""
    return [Violation("liveness", f"no {STEPS_AFTERWARDS} steps within {REST_PATIENCE_S:g} s; waits: {waits}\n{tail}")]


def _end(system: System) -> list[Violation]:
    """End trainers and service in order; they must obey."""
    violations: list[Violation] = []
    for process in [*system.trainers, system.service]:
        assert process is not None, "it was started with the system"
        code = process.end()
        struck = process.armed and code == -signal.SIGKILL
        if code not in (0, FENCED_EXIT) and not struck:
            violations.append(Violation("liveness", f"the {process.name} ended with {code}:\n{process.tail(12)}"))
    return violations


def _numbers(records: list[Record]) -> dict[str, int]:
    kinds = Counter(record["kind"] for record in records)
    outcomes = Counter((record["op"], record["outcome"]) for record in records if record["kind"] == "call")
    served = [record["step"] for record in records if record["kind"] == "call" and "sha256" in record]
    return {
        "statuses seen": kinds["status"],
        "service lives": sum(r["kind"] == "started" and r["process"] == "service" for r in records),
        "trainer lives": sum(r["kind"] == "started" and r["process"] == "trainer" for r in records),
        "redis lives": sum(r["kind"] == "started" and r["process"] == "redis" for r in records),
        "batches served": len(served),
        "of them served again": len(served) - len(set(served)),
        "services superseded while they slept": kinds["superseded_service"],
        "calls of superseded trainers refused": sum(n for (_, outcome), n in outcomes.items() if outcome == "fenced"),
        "tokens lost with services that died": tokens_lost(records),
    }


def tokens_lost(records: list[Record]) -> int:
    """Generated and not in the buffer, from what the statuses said: what each service wrote, less what was kept."""
    generated: dict[int, int] = {}
    kept = 0
    for status in (record for record in records if record["kind"] == "status"):
        total = sum(engine["tokens_generated"] for engine in status["engines"])
        generated[status["service_epoch"]] = max(total, generated.get(status["service_epoch"], 0))
        kept = max(kept, status["counters"].get("tokens_appended", 0))
    return max(0, sum(generated.values()) - kept)


def show(report: Report, console: Console) -> None:
    """The report as tables."""
    table = Table("fault", "times", title=f"seed {report.seed}, {report.seconds:.0f} s")
    for name, count in sorted(report.faults.items()):
        table.add_row(name, str(count))
    table.add_row("all", str(report.faults.total()), style="bold")
    for name, count in sorted(report.ends.items()):
        table.add_row(f"started again after: {name}", str(count), style="dim")
    console.print(table)
    table = Table("what came of it", "")
    for name, number in report.numbers.items():
        table.add_row(name, f"{number:,}")
    if report.final:
        table.add_row("steps in the surviving history", f"{len(report.final['history']):,}")
        for name, count in report.final["ledger"].items():
            table.add_row(f"groups {name}", f"{count:,}")
    table.add_row("violations", str(len(report.violations)), style="bold red" if report.violations else "bold green")
    console.print(table)
    for violation in report.violations[:20]:
        console.print(str(violation), style="red", markup=False)


def main() -> int:
    """Run from the command line; 1 on a violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long faults happen (without --faults)")
    parser.add_argument("--faults", type=int, help="until this many faults have happened")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--dir", type=Path, help="folder for histories and logs [default: a new temporary one]")
    words = parser.parse_args()
    folder = words.dir or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    console.print(f"seed {words.seed}, histories in {folder}", highlight=False)
    tokenizer = folder / "tokenizer"
    make_tokenizer().save_pretrained(tokenizer)
    report = run_chaos(folder, tokenizer, words.seed, words.seconds, words.faults)
    show(report, console)
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
