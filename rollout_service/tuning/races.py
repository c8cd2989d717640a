"""What over-provisioning inside a group (`rollout.samples_ratio`) does to lengths and to waiting, by simulation.

Every sample of a group writes a token in each step. The group is ready when n of its n' samples have finished; what the
others have by then goes on when the prompt comes up again in the next epoch, or is thrown away. Nothing else competes
for the engine, so the steps are a lower bound of what a real one shows.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

Draw = Callable[[], int]  # the length of one more sample of a prompt


@dataclass(frozen=True, slots=True)
class RaceResult:
    """Of all groups of a simulation. `mean_wait`: steps until a group is ready.

    `started_tokens` is the mean length that the samples which were started would have in the end; `lost_share`: of all
    tokens that were written, those that were thrown away.
    """

    trained_tokens: float
    started_tokens: float
    mean_wait: float
    lost_share: float


def lognormal_prompts(
    num_prompts: int, median: float, prompt_sigma: float, sample_sigma: float, seed: int
) -> list[Draw]:
    """Prompts with a median of their own, and samples around it."""
    rng = random.Random(seed)  # noqa: S311  a simulation

    def prompt(mean: float) -> Draw:
        return lambda: max(1, round(math.exp(rng.gauss(mean, sample_sigma))))

    return [prompt(rng.gauss(math.log(median), prompt_sigma)) for _ in range(num_prompts)]


def simulate_races(prompts: list[Draw], wanted: int, started: int, num_epochs: int, goes_on: bool) -> RaceResult:
    """Groups of `wanted` among `started` samples, once an epoch for each prompt."""
    trained: list[int] = []
    lengths: list[int] = []
    wait = written = lost = 0
    for draw in prompts:
        pooled: list[tuple[int, int]] = []  # (length, tokens that it has)
        for _ in range(num_epochs):
            fresh = [draw() for _ in range(started - len(pooled))]
            lengths += fresh
            runners = sorted([*pooled, *((length, 0) for length in fresh)], key=lambda runner: runner[0] - runner[1])
            ready = runners[wanted - 1][0] - runners[wanted - 1][1]
            trained += [length for length, _ in runners[:wanted]]
            wait += ready
            written += sum(min(length - has, ready) for length, has in runners)
            left = [(length, has + ready) for length, has in runners[wanted:]]
            lost += 0 if goes_on else sum(has for _, has in left)
            pooled = left if goes_on else []
    groups = len(prompts) * num_epochs
    return RaceResult(sum(trained) / len(trained), sum(lengths) / len(lengths), wait / groups, lost / written)
