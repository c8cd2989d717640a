"""Throughput against off-policy data: what a policy costs and gains, as points that can be compared.

Always true: all policies meet the same prompts with the same lengths; rounds at the start, when the buffer fills, are
left out; throughput is a share of the engine's ceiling, the tokens/s of all slots in use all the time.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rollout_service.scheduler.decisions import RoundLimits
from rollout_service.tuning.engine_model import EngineModel
from rollout_service.tuning.forecast import LengthForecast
from rollout_service.tuning.simulation import Simulation, TrainerModel
from rollout_service.tuning.workload import PromptLengths, Workload

WARM_UP_SHARE = 3  # a third of the rounds: the buffer fills in about `ratio` of them, and prompts get a history


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One policy on one workload. `throughput`: share of the ceiling; `off_policy`: of tokens with a lag."""

    throughput: float
    off_policy: float
    mean_lag: float
    max_lag: int
    mixed_share: float
    tokens_per_s: float


class TwoLevelWorkload:
    """Lognormal lengths in two levels: prompts differ by `between`, the samples of one by `within` (sigmas of logs).

    There are `num_prompts` of them, which come again in each epoch with the same level and other lengths; 0 is no end
    of prompts, none of which comes again.
    """

    def __init__(self, median: float, between: float, within: float, longest: int, num_prompts: int, seed: int) -> None:
        self._median, self._between, self._within = math.log(median), between, within
        self._longest, self._num_prompts, self._seed = longest, num_prompts, seed

    def prompt(self, index: int, num_samples: int) -> PromptLengths:
        """Prompt number `index`."""
        number = index % self._num_prompts if self._num_prompts else index
        level = random.Random(f"{self._seed}/level/{number}").gauss(self._median, self._between)  # noqa: S311
        rng = random.Random(f"{self._seed}/{index}")  # noqa: S311  a simulation
        drawn = (round(math.exp(rng.gauss(level, self._within))) for _ in range(num_samples))
        return PromptLengths(
            tuple(min(self._longest, max(1, length)) for length in drawn), prompt_tokens=50, prompt_id=str(number)
        )


def measure(
    limits: RoundLimits,
    engine: EngineModel,
    trainer: TrainerModel,
    workload: Workload,
    num_rounds: int,
    forecast: bool = True,
) -> FrontierPoint:
    """Run `num_rounds` rounds and measure all but the first third."""
    world = Simulation(limits, engine, trainer, workload, LengthForecast(limits.group_samples) if forecast else None)
    world.run(num_rounds)
    batches = world.batches[num_rounds // WARM_UP_SHARE :]
    lags = sum((batch.tokens_by_lag for batch in batches), Counter[int]())
    tokens = sum(lags.values())
    rate = sum(sum(b.lengths) for b in batches[1:]) / (batches[-1].trained_s - batches[0].trained_s)
    return FrontierPoint(
        throughput=rate * engine.step_s(engine.slots, 0) / engine.slots,
        off_policy=1 - lags[0] / tokens,
        mean_lag=sum(lag * count for lag, count in lags.items()) / tokens,
        max_lag=max(lags),
        mixed_share=sum(b.mixed_samples for b in batches) / sum(b.num_samples for b in batches),
        tokens_per_s=rate,
    )


def off_policy_at(points: Sequence[FrontierPoint], throughput: float) -> float | None:
    """Off-policy share of a policy at a throughput, straight between the points that surround it; None outside."""
    ordered = sorted(points, key=lambda point: point.throughput)
    for low, high in pairwise(ordered):
        if low.throughput <= throughput <= high.throughput:
            width = high.throughput - low.throughput
            part = (throughput - low.throughput) / width if width else 0.0
            return low.off_policy + part * (high.off_policy - low.off_policy)
    return None
