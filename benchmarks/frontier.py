"""Which policy buys throughput for the least off-policy data, by simulation with the service's own scheduler.

For each shape of lengths and each number of slots: policies and ratios, as share of the engine's ceiling and off-policy
share, beside what `fixed` with `fifo` has at the same throughput. A policy is better than `fixed` where the last column
is below 1.
"""

import csv
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import click

from benchmarks.report import report
from protocol.settings.rollout import Admission, RoundOrder
from rollout_service.scheduler.decisions import RoundLimits
from rollout_service.tuning.engine_model import EngineModel
from rollout_service.tuning.frontier import FrontierPoint, TwoLevelWorkload, measure, off_policy_at
from rollout_service.tuning.simulation import TrainerModel
from rollout_service.tuning.workload import DrawnWorkload, Workload

BATCH_GROUPS, GROUP_SAMPLES = 32, 8
LONGEST = 4000
NO_LAG_BOUND = 64  # so that every policy shows what it does by itself
POLICIES = (
    *((Admission.FIXED, RoundOrder.FIFO, ratio) for ratio in (1.0, 1.05, 1.1, 1.25, 1.5, 2.0)),
    *((Admission.FIXED, RoundOrder.LONGEST_FIRST, ratio) for ratio in (1.0, 1.05, 1.1, 1.25, 1.5)),
    *((Admission.FIXED, RoundOrder.FEWEST_OPEN, ratio) for ratio in (1.1, 1.5)),
    (Admission.TAPER, RoundOrder.LONGEST_FIRST, 1.25),
    (Admission.REFILL, RoundOrder.FIFO, 1.0),
    (Admission.BUDGET, RoundOrder.FIFO, 2.0),
)
TRAINER_SHARE = 0.5  # with a lookahead the trainer takes this share of a synchronous round


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation."""

    shape: str
    slots: int
    lookahead: int
    admission: Admission
    order: RoundOrder
    ratio: float
    num_rounds: int
    lengths: tuple[int, ...] = ()

    @property
    def limits(self) -> RoundLimits:
        """For the scheduler."""
        return RoundLimits(
            BATCH_GROUPS,
            GROUP_SAMPLES,
            self.ratio,
            self.lookahead,
            NO_LAG_BOUND,
            admission=self.admission,
            order=self.order,
        )


def workload_of(case: Case) -> Workload:
    """By the name of its shape; `epochs` is one whose prompts come again, so that they have a history."""
    match case.shape:
        case "two levels, epochs":
            return TwoLevelWorkload(100, 0.7, 0.7, LONGEST, num_prompts=256, seed=0)
        case "two levels, one epoch":
            return TwoLevelWorkload(100, 0.7, 0.7, LONGEST, num_prompts=0, seed=0)
        case "levels only, epochs":
            return TwoLevelWorkload(100, 1.0, 0.2, LONGEST, num_prompts=256, seed=0)
        case _:
            return DrawnWorkload(case.lengths, (50,), seed=0)


def run(case: Case) -> FrontierPoint:
    """One simulation."""
    engine = EngineModel(case.slots)
    trainer = TrainerModel()
    if case.lookahead:
        alone = replace(case, lookahead=0, ratio=1.0, admission=Admission.FIXED, num_rounds=6)
        point = measure(alone.limits, engine, trainer, workload_of(alone), alone.num_rounds)
        round_s = BATCH_GROUPS * GROUP_SAMPLES * _mean(case) / point.tokens_per_s
        trainer = TrainerModel(step_s=TRAINER_SHARE * round_s)
    return measure(case.limits, engine, trainer, workload_of(case), case.num_rounds)


def _mean(case: Case) -> float:
    drawn = [length for i in range(100) for length in workload_of(case).prompt(i, GROUP_SAMPLES).lengths]
    return sum(drawn) / len(drawn)


def cases(num_rounds: int, shapes: dict[str, tuple[int, ...]], slots: tuple[int, ...]) -> Iterator[Case]:
    """All of them: without lookahead everywhere, with it on the first shape, where it only shifts every lag by one."""
    for number, (shape, lengths) in enumerate(shapes.items()):
        for count, lookahead in product(slots, (0, 1) if number == 0 else (0,)):
            for admission, order, ratio in POLICIES:
                yield Case(shape, count, lookahead, admission, order, ratio, num_rounds, lengths)


def rows_of(points: dict[Case, FrontierPoint]) -> list[dict[str, object]]:
    """One row a case, with what `fixed` in the order `fifo` has at its throughput."""
    rows: list[dict[str, object]] = []
    for case, point in points.items():
        same = [
            p
            for c, p in points.items()
            if (c.shape, c.slots, c.lookahead, c.admission, c.order)
            == (case.shape, case.slots, case.lookahead, Admission.FIXED, RoundOrder.FIFO)
        ]
        plain = off_policy_at(same, point.throughput)
        rows.append(
            {
                "lengths": case.shape,
                "slots/samples": case.slots / (BATCH_GROUPS * GROUP_SAMPLES),
                "lookahead": case.lookahead,
                "admission": case.admission.value,
                "order": case.order.value,
                "ratio": case.ratio,
                "of ceiling": point.throughput,
                "off-policy": point.off_policy,
                "mean lag": point.mean_lag,
                "max lag": point.max_lag,
                "of fixed's": point.off_policy / plain if plain else "",
            }
        )
    return rows


def read_lengths(path: Path) -> tuple[int, ...]:
    """Column GeneratedTokens of a CSV file."""
    with path.open(newline="") as file:
        return tuple(min(LONGEST, max(1, int(row["GeneratedTokens"]))) for row in csv.DictReader(file))


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the table as JSON.")
@click.option("--lengths-csv", type=click.Path(exists=True, path_type=Path), help="CSV with a column GeneratedTokens.")
@click.option("--rounds", default=60, show_default=True, help="Rounds of one simulation.")
@click.option("--processes", default=2, show_default=True, help="Simulations at once.")
@click.option("--quick", is_flag=True, help="One shape and one number of slots.")
def main(json_file: Path | None, lengths_csv: Path | None, rounds: int, processes: int, quick: bool) -> None:
    """Compare policies of admission and order by simulation."""
    shapes: dict[str, tuple[int, ...]] = {"two levels, epochs": ()}
    if not quick:
        shapes |= {"two levels, one epoch": (), "levels only, epochs": ()}
        shapes |= {lengths_csv.stem: read_lengths(lengths_csv)} if lengths_csv else {}
    slots = (64,) if quick else (64, 128, 256)
    wanted = list(cases(rounds, shapes, slots))
    with ProcessPoolExecutor(processes) as pool:
        points = dict(zip(wanted, pool.map(run, wanted, chunksize=4), strict=True))
    report("Throughput against off-policy data", rows_of(points), json_file)


if __name__ == "__main__":
    main()
