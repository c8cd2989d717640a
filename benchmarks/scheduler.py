"""What deciding and serving cost: the scheduler for each event, the service for each token, the service on an engine.

An event is a finished sample: the scheduler is told, and decides. Rounds, admission and resumption happen as they come.
At 1k, 10k and 100k samples in flight it should be flat, and at most 50 us, whatever the policy. The service's CPU time
is that of its whole process, the simulated engine in it included. With `--model`, the same requests go to vLLM's
AsyncLLM and through the whole service in turns: of the tokens/s at least 0.98 should be left.
"""

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from benchmarks.long_tail_parts.overhead import against_bare_engine, simulated_service
from benchmarks.report import report
from protocol.settings.rollout import Admission, RoundOrder
from rollout_service.scheduler.admission import Outlook
from rollout_service.scheduler.decisions import Admit, Observation, OfferBatch, Park, RoundLimits, Start
from rollout_service.scheduler.rounds import RoundScheduler

GROUP_SAMPLES = 8
POLICIES = (
    (Admission.FIXED, RoundOrder.FIFO),
    (Admission.FIXED, RoundOrder.LONGEST_FIRST),
    (Admission.FIXED, RoundOrder.FEWEST_OPEN),
    (Admission.BUDGET, RoundOrder.FIFO),
    (Admission.TAPER, RoundOrder.LONGEST_FIRST),
)
SERVICE_SIZES = (1_000, 10_000)  # samples in flight of a whole service; 100k of them take minutes to start


class InstantWorld:
    """Carries out every decision at once and keeps what the scheduler is shown."""

    def __init__(self, in_flight: int, admission: Admission, order: RoundOrder) -> None:
        groups = in_flight // GROUP_SAMPLES
        limits = RoundLimits(
            groups // 2, GROUP_SAMPLES, ratio=2.0, lookahead=1, max_lag=4, admission=admission, order=order
        )
        self.scheduler = RoundScheduler(limits)
        self.seen = Observation(0.0, in_flight, 0, 0, 0, 0, 0, 0, 0, 0, forecast=self, kv_tokens=in_flight * 500)
        self.running: list[str] = []
        self.left: dict[str, int] = {}
        self.num_groups = 0

    def remaining(self, sample_id: str) -> float:
        """Some length."""
        return float(len(sample_id) * 7 % 50)

    def upcoming(self, count: int) -> Sequence[float]:
        """Some lengths."""
        return [float((self.num_groups + k) * 37 % 400) for k in range(count)]

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
                    outlook = Outlook(float(self.num_groups * 37 % 400), 200.0)
                    self.scheduler.admitted(group_id, self.num_groups, samples, outlook)
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


def measure(in_flight: int, policy: tuple[Admission, RoundOrder], num_events: int, repeats: int) -> dict[str, object]:
    """Median microseconds for each event."""
    rng = random.Random(0)  # which sample finishes next
    world = InstantWorld(in_flight, *policy)
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
    return {
        "samples in flight": in_flight,
        "admission": policy[0].value,
        "order": policy[1].value,
        "median us/event": statistics.median(times),
        "worst us/event": max(times),
    }


async def service_rows() -> list[dict[str, object]]:
    """One row for each size."""
    with tempfile.TemporaryDirectory(prefix="april-scheduler-") as folder:
        return [await simulated_service(size, Path(folder)) for size in SERVICE_SIZES]


def _named(json_file: Path | None, part: str) -> Path | None:
    return json_file.with_stem(f"{json_file.stem}-{part}") if json_file else None


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the tables as JSON.")
@click.option("--events", default=20_000, show_default=True, help="Events of one repeat.")
@click.option("--repeats", default=5, show_default=True, help="Repeats.")
@click.option("--service/--no-service", default=True, show_default=True, help="Measure the whole service, too.")
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Compare on this model.")
@click.option("--slots", default=32, show_default=True, help="Slots of the engine with --model.")
@click.option("--tokens", default=96, show_default=True, help="Length of each response with --model.")
@click.option("--threads", default=None, type=int, help="CPU threads of the engine with --model.")
def main(
    json_file: Path | None,
    events: int,
    repeats: int,
    service: bool,
    model: Path | None,
    slots: int,
    tokens: int,
    threads: int | None,
) -> None:
    """Time the scheduler for each event, and the service."""
    rows = [measure(size, policy, events, repeats) for policy in POLICIES for size in (1_000, 10_000, 100_000)]
    report("Round scheduler", rows, json_file)
    if service:
        report("Service on the simulated engine", asyncio.run(service_rows()), _named(json_file, "service"))
    if model:
        bare = asyncio.run(against_bare_engine(model, slots, tokens, repeats, threads))
        report("Service against the bare engine", bare, _named(json_file, "engine"))


if __name__ == "__main__":
    main()
