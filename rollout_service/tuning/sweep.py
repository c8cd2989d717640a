"""Many simulations: ratios and policies over the same prompts, in as many processes as there are cores.

Always true:
- all points of a sweep meet the same prompts: parts with the same number have the same seed, so that differences
  between points are differences of the points (common random numbers);
- rounds from the start on, while the buffer fills, are not counted.
"""

import gc
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context, parent_process

import numpy as np

from protocol.errors import DataError
from protocol.settings.rollout import Admission, RoundOrder
from rollout_service.scheduler.decisions import RoundLimits
from rollout_service.tuning.engine_model import EngineModel
from rollout_service.tuning.forecast import LengthForecast
from rollout_service.tuning.lengths import LengthSource, can_draw_again
from rollout_service.tuning.results import BatchResult, RoundResult
from rollout_service.tuning.simulation import Simulation, TrainerModel
from rollout_service.tuning.student import t_95

NUM_PARTS = 4  # of the rounds of a point: a standard error can be had from four, and two cores are kept busy
FORESEEING = frozenset({Admission.BUDGET, Admission.TAPER})  # want predicted lengths
WARM_UP_ROUNDS = 10  # and as many again for each round that groups stay in the buffer on average


@dataclass(frozen=True, slots=True)
class Point:
    """What is chosen."""

    ratio: float
    admission: Admission = Admission.FIXED
    order: RoundOrder = RoundOrder.FIFO
    lookahead: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is given. `max_lag` None: so large that it never binds."""

    lengths: LengthSource
    engine: EngineModel
    trainer: TrainerModel
    batch_groups: int
    group_samples: int
    max_lag: int | None = None
    bootstrap: bool = False

    @property
    def draws_again(self) -> bool:
        """Whether each part has prompts of its own, drawn again from those observed, rather than a seed of its own."""
        return self.bootstrap and can_draw_again(self.lengths)


@dataclass(frozen=True, slots=True)
class PartResult:
    """One part of a point's rounds, added up."""

    wall_s: float
    num_rounds: int
    trained_tokens: int
    trained_samples: int
    mixed_samples: int
    tokens_by_lag: Counter[int]
    start_age: float
    idle_slot_s: float
    slot_s: float
    generated_s: float
    dispatched_tokens: int
    num_fresh: int
    reprefilled_tokens: int
    num_resumes: int
    num_preemptions: int
    surplus_groups: int
    parked_groups: int
    parked_samples: int
    parked_tokens: int
    tail_saved_s: float
    seed: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second."""
        return self.trained_tokens / self.wall_s if self.wall_s > 0 else math.inf


@dataclass(frozen=True, slots=True)
class PointResult:
    """A point over all its parts, in the order of their seeds. `drawn_again`: each has prompts drawn again."""

    point: Point
    max_lag: int
    parts: tuple[PartResult, ...]
    drawn_again: bool = False

    def total(self, name: str) -> float:
        """A sum over all parts."""
        return float(sum(getattr(part, name) for part in self.parts))

    def per_round(self, name: str) -> float:
        """A mean over all rounds."""
        return self.total(name) / self.total("num_rounds")

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second."""
        return self.total("trained_tokens") / self.total("wall_s")

    @property
    def lags(self) -> Counter[int]:
        """Trained tokens by lag."""
        return sum((part.tokens_by_lag for part in self.parts), Counter[int]())

    @property
    def off_policy_share(self) -> float:
        """Share of trained tokens that an older version wrote than the one trained."""
        lags = self.lags
        return 1 - lags[0] / max(1, lags.total())

    @property
    def mixed_share(self) -> float:
        """Share of trained samples that more than one version wrote."""
        return self.total("mixed_samples") / self.total("trained_samples")

    @property
    def mean_lag(self) -> float:
        """Over trained tokens."""
        lags = self.lags
        return sum(lag * count for lag, count in lags.items()) / max(1, lags.total())

    @property
    def largest_lag(self) -> int:
        """Of any trained token."""
        return max((lag for lag, count in self.lags.items() if count), default=0)

    @property
    def bubble_share(self) -> float:
        """Share of slots times seconds in which nothing was decoded."""
        return self.total("idle_slot_s") / self.total("slot_s")


def speed_up(result: PointResult, base: PointResult) -> tuple[float, float]:
    """Throughput over that of `base`, and its standard error over the parts, which met the same prompts.

    Parts that differ by seed are averaged, so the error is that of a mean. Parts whose prompts were drawn again each
    show how far another sample of prompts may be from this one: that spread is the error, and no mean lowers it.
    """
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(result.parts, base.parts, strict=True)]
    gain = result.tokens_per_s / base.tokens_per_s
    if len(ratios) < 2:
        return gain, math.nan
    spread = float(np.std(ratios, ddof=1))
    return gain, spread if result.drawn_again else spread / math.sqrt(len(ratios))


def half_band(result: PointResult, base: PointResult) -> float:
    """Half of the band of 95 % of the speed-up, by Student's t for so few parts; 0 if there is one part only."""
    _, error = speed_up(result, base)
    return 0.0 if math.isnan(error) else t_95(len(result.parts)) * error


def warm_up_rounds(point: Point) -> int:
    """Rounds until the buffer is as full as it will be."""
    return WARM_UP_ROUNDS * (math.ceil(point.ratio) + point.lookahead)


def round_limits(scenario: Scenario, point: Point) -> RoundLimits:
    """The scheduler's limits."""
    return RoundLimits(
        batch_groups=scenario.batch_groups,
        group_samples=scenario.group_samples,
        ratio=point.ratio,
        lookahead=point.lookahead,
        max_lag=UNBOUNDED_LAG if scenario.max_lag is None else scenario.max_lag,
        admission=point.admission,
        order=point.order,
    )


UNBOUNDED_LAG = 2**31  # more rounds than anybody simulates: nothing must ever finish for it


def simulate_part(scenario: Scenario, point: Point, num_rounds: int, seed: int) -> PartResult:
    """Some rounds of one point."""
    workload = scenario.lengths.workload(seed, scenario.bootstrap)
    foresees = point.admission in FORESEEING or point.order is RoundOrder.LONGEST_FIRST
    forecast = LengthForecast(scenario.group_samples) if foresees else None
    simulation = Simulation(round_limits(scenario, point), scenario.engine, scenario.trainer, workload, forecast)
    skipped = warm_up_rounds(point)
    simulation.run(skipped + num_rounds)
    batches = simulation.batches[skipped:]
    began_s = simulation.batches[skipped - 1].trained_s
    rounds = simulation.rounds[skipped : skipped + num_rounds]
    return replace(_added_up(batches, rounds, began_s), seed=seed)


def _added_up(batches: Sequence[BatchResult], rounds: Sequence[RoundResult], began_s: float) -> PartResult:
    def over_rounds(name: str) -> int:
        return sum(getattr(this, name) for this in rounds)

    return PartResult(
        wall_s=batches[-1].trained_s - began_s,
        num_rounds=len(rounds),
        trained_tokens=sum(sum(batch.lengths) for batch in batches),
        trained_samples=sum(batch.num_samples for batch in batches),
        mixed_samples=sum(batch.mixed_samples for batch in batches),
        tokens_by_lag=sum((batch.tokens_by_lag for batch in batches), Counter[int]()),
        start_age=sum(batch.mean_start_age for batch in batches),
        idle_slot_s=over_rounds("idle_slot_s"),
        slot_s=over_rounds("slot_s"),
        generated_s=sum(this.ended_s - this.started_s for this in rounds),
        dispatched_tokens=over_rounds("dispatched_tokens"),
        num_fresh=over_rounds("num_fresh"),
        reprefilled_tokens=over_rounds("reprefilled_tokens"),
        num_resumes=over_rounds("num_resumes"),
        num_preemptions=over_rounds("num_preemptions"),
        surplus_groups=over_rounds("surplus_groups"),
        parked_groups=over_rounds("parked_groups"),
        parked_samples=over_rounds("parked_samples"),
        parked_tokens=over_rounds("parked_tokens"),
        tail_saved_s=over_rounds("tail_saved_s"),
    )


def sweep(
    scenario: Scenario,
    points: Sequence[Point],
    num_rounds: int,
    num_processes: int | None = None,
    part_done: Callable[[], None] = lambda: None,
) -> Iterator[PointResult]:
    """Every point over `num_rounds` rounds in NUM_PARTS parts, as each is done; in this process if it is to be one.

    `part_done` is called after each part. Raises DataError if a process is killed, for want of memory perhaps.
    """
    rounds_of_part = math.ceil(num_rounds / NUM_PARTS)
    jobs = [(point, seed) for point in points for seed in range(NUM_PARTS)]
    done: dict[Point, dict[int, PartResult]] = {point: {} for point in points}
    for point, part in _parts(scenario, jobs, rounds_of_part, num_processes or usable_cores()):
        done[point][part.seed] = part
        part_done()
        if len(done[point]) == NUM_PARTS:
            parts = tuple(done[point][seed] for seed in range(NUM_PARTS))
            yield PointResult(point, round_limits(scenario, point).max_lag, parts, scenario.draws_again)


def _parts(
    scenario: Scenario, jobs: Sequence[tuple[Point, int]], num_rounds: int, num_processes: int
) -> Iterator[tuple[Point, PartResult]]:
    if num_processes == 1:
        for point, seed in jobs:
            yield point, simulate_part(scenario, point, num_rounds, seed)
        return
    # The slowest first, so that no core waits long at the end.
    ordered = sorted(jobs, key=lambda job: -job[0].ratio)
    with ProcessPoolExecutor(num_processes, get_context("spawn"), _adopt, (scenario, num_rounds)) as pool:
        futures = {pool.submit(_job, point, seed): point for point, seed in ordered}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool as error:
            raise DataError(
                "a process of the simulation was killed, for want of memory perhaps: free some, or give fewer "
                "--processes"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


_adopted: list[tuple[Scenario, int]] = []

# Simulated groups are many small objects in cycles: looking for garbage less often takes a tenth off the time.
GC_THRESHOLD = 200_000


def _adopt(scenario: Scenario, num_rounds: int) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.set_threshold(GC_THRESHOLD)
    _adopted[:] = [(scenario, num_rounds)]


def _end_with_parent() -> None:
    """Processes of a pool wait for ever for the next job of a parent that was killed."""
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


def _job(point: Point, seed: int) -> PartResult:
    scenario, num_rounds = _adopted[0]
    return simulate_part(scenario, point, num_rounds, seed)


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
