"""How a system came through each fault, from its history alone.

A system has recovered from a fault when a step is trained that was not trained when the fault was over; it is asked for
its status all the time, so that is known to about a tenth of a second.
"""

import signal
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.failpoints import EXIT_CODE
from tests.support.journal import Record

CRASHES = (-signal.SIGKILL, EXIT_CODE)


@dataclass
class Recovery:
    """One kind of fault: how often, after how many a step was trained, and after how long where nothing else struck."""

    times: int = 0
    survived: int = 0
    alone_s: list[float] = field(default_factory=list[float])

    @property
    def median_s(self) -> float | None:
        """Of those that no other fault met; None without any."""
        return statistics.median(self.alone_s) if self.alone_s else None


def recoveries(records: Sequence[Record]) -> dict[str, Recovery]:
    """By the name of the fault; those that struck nothing are left out."""
    faults = _faults(records)
    statuses = [record for record in records if record["kind"] == "status"]
    found: dict[str, Recovery] = defaultdict(Recovery)
    for index, (_, over_at, name) in enumerate(faults):
        recovery = found[name]
        recovery.times += 1
        again_at = _trained_again(statuses, over_at)
        if again_at is None:
            continue
        recovery.survived += 1
        if not any(began_at < again_at for began_at, _, _ in faults[index + 1 :]):
            recovery.alone_s.append(again_at - over_at)
    return dict(sorted(found.items()))


def undisturbed_step_s(records: Sequence[Record]) -> float | None:
    """What a step takes when nothing strikes: the median after the last fault."""
    faults = _faults(records)
    calm_at = max((over_at for _, over_at, _ in faults), default=0.0)
    firsts: dict[int, float] = {}
    for record in records:
        if record["kind"] == "status" and record["at"] > calm_at:
            firsts.setdefault(record["trained_step"], record["at"])
    times = [
        firsts[step + 1] - firsts[step] for step in firsts if step + 1 in firsts and firsts[step + 1] > firsts[step]
    ]
    return statistics.median(times) if times else None


def service_start_s(records: Sequence[Record]) -> float | None:
    """From the start of a service's process to the first status that it answers: the median of those that got there."""
    started = {r["child"]: r["at"] for r in records if r["kind"] == "started" and r["process"] == "service"}
    answered: dict[int, float] = {}
    for record in records:
        if record["kind"] == "status":
            answered.setdefault(record["pid"], record["at"])
    times = [at - started[pid] for pid, at in answered.items() if pid in started]
    return statistics.median(times) if times else None


def _faults(records: Sequence[Record]) -> list[tuple[float, float, str]]:
    """(began, over, name) in the order in which they began."""
    faults = [(r["began_at"], r["at"], r["name"]) for r in records if r["kind"] == "fault" and r["struck"]]
    armed = {r["child"]: r["failpoint"] for r in records if r["kind"] == "started" and r["failpoint"]}
    killed = {r["child"] for r in records if r["kind"] == "kill"}
    for record in records:
        struck = record["kind"] == "ended" and record["code"] in CRASHES and record["child"] not in killed
        if struck and record["child"] in armed:
            place = armed[record["child"]].partition("=")[0]
            faults.append((record["at"], record["at"], f"{record['process']} crashed at {place}"))
    return sorted(faults)


def _trained_again(statuses: Sequence[Record], over_at: float) -> float | None:
    before = None
    for status in statuses:
        if status.get("asked_at", status["at"]) < over_at:
            continue
        step = status["trained_step"]
        before = step if before is None else min(before, step)
        if step > before:
            return status["at"]
    return None
