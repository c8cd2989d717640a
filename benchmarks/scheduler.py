"""Microseconds of the round scheduler for each event, at 1k, 10k and 100k samples in flight; it should be flat.

An event is a finished sample: the scheduler is told, and decides. Rounds, admission and resumption happen as they come.
"""

import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

import click

from benchmarks.report import report
from rollout_service.scheduler.decisions import Admit, Observation, OfferBatch, Park, RoundLimits, Start
from rollout_service.scheduler.rounds import RoundScheduler

GROUP_SAMPLES = 8


class InstantWorld:
    """Carries out every decision at once and keeps what the scheduler is shown."""

    def __init__(self, in_flight: int) -> None:
        groups = in_flight // GROUP_SAMPLES
        self.scheduler = RoundScheduler(RoundLimits(groups // 2, GROUP_SAMPLES, ratio=2.0, lookahead=1, max_lag=4))
        self.seen = Observation(0.0, in_flight, 0, 0, 0, 0, 0, 0, 0, 0)
        self.running: list[str] = []
        self.left: dict[str, int] = {}
        self.num_groups = 0

    def settle(self) -> None:
        """Decide until nothing is decided."""
        while decisions := self.scheduler.decide(self.seen):
            for decision in decisions:
                self._carry_out(decision)

    def finish(self, sample_id: str) -> None:
        """One sample finished and was scored."""
        group_id = sample_id.partition(".")[0]
        self.scheduler.ended(sample_id)
        self.left[group_id] -= 1
        if not self.left[group_id]:
            del self.left[group_id]
            self.scheduler.closed(group_id, ready=True)
            self.seen = replace(self.seen, ready=self.seen.ready + 1)

    def _carry_out(self, decision: object) -> None:
        match decision:
            case Admit(count):
                for _ in range(count):
                    self.num_groups += 1
                    group_id = f"g{self.num_groups}"
                    self.left[group_id] = GROUP_SAMPLES
                    samples = [(f"{group_id}.{i}", i) for i in range(GROUP_SAMPLES)]
                    self.scheduler.admitted(group_id, self.num_groups, samples)
            case Start(sample_ids):
                self.running.extend(sample_ids)
            case Park(sample_ids, _):
                for sample_id in sample_ids:
                    self.scheduler.parked(sample_id)
                self.running.clear()
            case OfferBatch(_):
                batch = self.scheduler.limits.batch_groups
                step = self.seen.last_leased_step + 1  # a trainer that takes no time
                self.seen = replace(
                    self.seen,
                    ready=self.seen.ready - batch,
                    last_leased_step=step,
                    trained_step=step,
                    newest_step=step,
                    newest_version=step,
                    active_version=step,
                )
                self.scheduler.offered()
            case _:
                pass


def measure(in_flight: int, num_events: int, repeats: int) -> dict[str, object]:
    """Median microseconds for each event."""
    rng = random.Random(0)
    world = InstantWorld(in_flight)
    world.settle()
    times: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(num_events):
            index = rng.randrange(len(world.running))
            world.running[index], world.running[-1] = world.running[-1], world.running[index]
            world.finish(world.running.pop())
            world.settle()
        times.append((time.perf_counter() - started) / num_events * 1e6)
    return {"samples in flight": in_flight, "median us/event": statistics.median(times), "worst us/event": max(times)}


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the table as JSON.")
@click.option("--events", default=20_000, show_default=True, help="Events of one repeat.")
@click.option("--repeats", default=5, show_default=True, help="Repeats.")
def main(json_file: Path | None, events: int, repeats: int) -> None:
    """Time the scheduler for each event."""
    rows = [measure(size, events, repeats) for size in (1_000, 10_000, 100_000)]
    report("Round scheduler", rows, json_file)


if __name__ == "__main__":
    main()
