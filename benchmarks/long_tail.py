"""Rounds on the real engine with a heavy tail of lengths: what each policy makes of the same engine.

One vLLM engine with the demo's model, one service for each policy, lookahead 0, a trainer that takes no time. The
policies take turns of one round each, so that whatever else the machine does meets all of them alike, and all of them
meet the same prompts with the same lengths. A shared machine's speed changes within seconds, so the engine alone is
measured before and after every turn: shares compare a policy's tokens with what the engine alone would have made of the
same seconds.

    (a) ratio 1, in order            a synchronous step: nothing is ever parked
    (b) ratios 1.25 to 3, `fixed`    APRIL
    (c) `longest_first`              the default policy, at full speed and at a ratio that keeps off-policy data low
    (d) the same engine fed endlessly, without rounds: the ceiling
"""

import asyncio
import csv
import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np

from benchmarks.long_tail_parts.contender import Contender, Turn, contending
from benchmarks.long_tail_parts.engine import ForcedPool, endless_policy, pool_settings, prompt_tokens
from benchmarks.report import report
from protocol.heap import freeze_heap
from protocol.settings import RunSettings
from protocol.settings.rollout import Admission, RoundOrder
from rollout_service.engines.interface import GenerationRequest, SamplingParameters
from rollout_service.engines.vllm_engine import VllmEngine
from rollout_service.tuning.frontier import TwoLevelWorkload
from rollout_service.tuning.workload import DrawnWorkload, Workload

LONGEST = 400  # the demo's model holds 512 tokens; long responses are cut here, as by a token limit
MEDIAN, BETWEEN, WITHIN = 40.0, 0.7, 0.7  # p99/p50 = exp(2.33 sqrt(0.7² + 0.7²)) = 10 before the cut
TAIL_WANTED = 5.0  # p99/p50
AZURE_SCALE = 4  # lengths of the trace are divided by it, to fit the model's context
NUM_THREADS = 1  # of the engine: beside it the service needs a core, as it has where engines run on GPUs
CEILING_S, MIXING_S = 2.0, 1.0  # of each turn of the ceiling, and before it, until its lengths are mixed
ENDLESS_GROUPS = 1_000_000  # numbers of the ceiling's requests, beyond those of any policy


@dataclass(frozen=True, slots=True)
class Policy:
    """One row of the table."""

    name: str
    ratio: float
    order: RoundOrder = RoundOrder.FIFO
    admission: Admission = Admission.FIXED


POLICIES = (
    Policy("(a) synchronous", 1.0),
    *(Policy(f"(b) fixed {ratio:g}", ratio) for ratio in (1.1, 1.25, 1.5, 2.0, 3.0)),
    Policy("(c) longest first 1.05", 1.05, RoundOrder.LONGEST_FIRST),
    Policy("(c) longest first 1.25", 1.25, RoundOrder.LONGEST_FIRST),
    Policy("(c) longest first 2", 2.0, RoundOrder.LONGEST_FIRST),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the experiment."""

    batch_groups: int
    group_samples: int
    slots: int
    num_prompts: int
    warm_up: int
    rounds: int


FULL = Shape(batch_groups=32, group_samples=8, slots=64, num_prompts=96, warm_up=4, rounds=6)
QUICK = Shape(batch_groups=8, group_samples=4, slots=16, num_prompts=24, warm_up=2, rounds=2)


def workload_of(lengths_csv: Path | None, shape: Shape) -> Workload:
    """Two levels of lognormal lengths, or those of a trace, which are as different within a prompt as between."""
    if lengths_csv is None:
        return TwoLevelWorkload(MEDIAN, BETWEEN, WITHIN, LONGEST, shape.num_prompts, seed=0)
    with lengths_csv.open(newline="") as file:
        lengths = [int(row["GeneratedTokens"]) // AZURE_SCALE for row in csv.DictReader(file)]
    return DrawnWorkload([min(LONGEST, max(1, length)) for length in lengths], (24,), seed=0)


def tail_of(workload: Workload) -> float:
    """p99/p50 of the lengths."""
    lengths = [length for i in range(2000) for length in workload.prompt(i, 8).lengths]
    return float(np.percentile(lengths, 99) / np.percentile(lengths, 50))


def settings_of(policy: Policy, base: RunSettings, shape: Shape) -> RunSettings:
    """A run of this policy on the engine of `base`."""
    changed = base.model_dump(exclude_unset=True)
    changed["run"] |= {"name": f"long-tail-{policy.order.value}-{policy.ratio:g}".replace("_", "-")}
    changed["run"] |= {"dir": base.run_dir / f"{policy.order.value}-{policy.ratio:g}"}
    changed["data"] |= {"train_batch_size": shape.batch_groups, "shuffle": False}
    changed["rollout"] = {
        "n": shape.group_samples,
        "ratio": policy.ratio,
        "lookahead": 0,
        "max_lag": 8,
        "admission": policy.admission,
        "order": policy.order,
        "checkpoint_interval_s": 60.0,
    }
    return RunSettings.model_validate(changed)


async def ceiling(pool: ForcedPool, group_samples: int, numbers: Iterator[int]) -> float:
    """Tokens/s of the engine with a request for every slot all the time; `numbers` are unused ones for requests."""
    stop = asyncio.Event()

    async def one(number: int) -> None:
        group, index = divmod(number, group_samples)
        name = f"g{ENDLESS_GROUPS + group:012d}.{index:03d}@1"
        sampling = SamplingParameters(max_tokens=LONGEST, temperature=1.0)
        async for _ in pool.generate(GenerationRequest(name, prompt_tokens(number), 0, sampling)):
            if stop.is_set():
                await pool.abort([name])

    async def slot() -> None:
        while not stop.is_set():
            await one(next(numbers))

    slots = [asyncio.create_task(slot()) for _ in range(pool.slots)]
    await asyncio.sleep(MIXING_S)
    pool.look()
    began_s = time.perf_counter()
    await asyncio.sleep(CEILING_S)
    tokens = pool.look().tokens
    rate = tokens / (time.perf_counter() - began_s)
    stop.set()
    await asyncio.gather(*slots)
    return rate


@dataclass(frozen=True, slots=True)
class Measured:
    """All turns of all policies, in their order; `beside`: tokens/s of the engine alone around each of them."""

    policies: tuple[Policy, ...]
    turns: dict[str, list[Turn]]
    beside: dict[str, list[float]]
    shape: Shape

    def rate(self, name: str) -> float:
        """Trained tokens/s of a policy."""
        return sum(turn.num_tokens for turn in self.turns[name]) / sum(turn.seconds for turn in self.turns[name])

    def of_ceiling(self, name: str) -> float:
        """Trained tokens of a policy over those that the engine alone would have made in its turns."""
        turns, beside = self.turns[name], self.beside[name]
        possible = sum(turn.seconds * rate for turn, rate in zip(turns, beside, strict=True))
        return sum(turn.num_tokens for turn in turns) / possible

    @property
    def ceiling(self) -> float:
        """Tokens/s of the engine alone, the median."""
        return float(np.median([rate for rates in self.beside.values() for rate in rates]))


async def measure(policies: tuple[Policy, ...], base: RunSettings, workload: Workload, shape: Shape) -> Measured:
    """Turns of one round, `warm_up` of each that aren't counted, then `rounds` that are."""
    assert base.model.path is not None, "the engine has a model"
    model = Path(base.model.path)
    pool = ForcedPool([VllmEngine(base, "engine-0")], workload, shape.group_samples)
    await pool.start()
    freeze_heap()  # as the service does
    turns: dict[str, list[Turn]] = {policy.name: [] for policy in policies}
    alone: list[float] = []  # one before every turn that counts, and one after the last
    numbers = itertools.count()
    try:
        async with AsyncExitStack() as stack:
            contenders: dict[str, Contender] = {}
            for policy in policies:
                context = contending(settings_of(policy, base, shape), pool, model, shape.num_prompts)
                contenders[policy.name] = await stack.enter_async_context(context)
            for number in range(shape.warm_up + shape.rounds):
                for name, contender in contenders.items():
                    if number >= shape.warm_up:
                        alone.append(await ceiling(pool, shape.group_samples, numbers))
                    turn = await contender.turn()
                    if number >= shape.warm_up:
                        turns[name].append(turn)
            alone.append(await ceiling(pool, shape.group_samples, numbers))
    finally:
        await pool.close()
    around = [(before + after) / 2 for before, after in itertools.pairwise(alone)]
    beside = {policy.name: around[index :: len(policies)] for index, policy in enumerate(policies)}
    return Measured(policies, turns, beside, shape)


def rows_of(measured: Measured) -> list[dict[str, object]]:
    """The table."""
    synchronous = measured.of_ceiling(measured.policies[0].name)
    rows: list[dict[str, object]] = []
    for name, turns in measured.turns.items():
        tokens = sum(t.num_tokens for t in turns)
        seconds = [t.seconds for t in turns]
        slot_s = sum(t.work.seconds for t in turns) * measured.shape.slots
        rows.append(
            {
                "policy": name,
                "tokens/s": measured.rate(name),
                "of (a)": measured.of_ceiling(name) / synchronous,
                "of (d)": measured.of_ceiling(name),
                "older version": sum(t.num_lagging for t in turns) / tokens,
                "resumed": sum(t.num_resumed_tokens for t in turns) / tokens,
                "mixed samples": sum(t.num_mixed for t in turns) / sum(t.num_samples for t in turns),
                "mean lag": sum(t.lag_sum for t in turns) / tokens,
                "max lag": max(t.max_lag for t in turns),
                "re-prefilled/token": sum(t.work.reprefilled for t in turns) / tokens,
                "bubble": sum(t.work.idle_slot_s for t in turns) / slot_s,
                "round p50 s": float(np.percentile(seconds, 50)),
                "round p99 s": float(np.percentile(seconds, 99)),
            }
        )
    last: dict[str, object] = dict.fromkeys(rows[0], "")
    last |= {"policy": "(d) endless", "tokens/s": measured.ceiling, "of (a)": 1 / synchronous, "of (d)": 1.0}
    rows.append(last)
    return rows


def run(policies: tuple[Policy, ...], workload: Workload, shape: Shape) -> Measured:
    """Build the engine and measure."""
    with tempfile.TemporaryDirectory(prefix="april-long-tail-") as temporary:
        folder = Path(temporary)
        base = pool_settings(endless_policy(folder / "model"), folder, shape.slots, LONGEST, NUM_THREADS)
        return asyncio.run(measure(policies, base, workload, shape))


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the table as JSON.")
@click.option("--lengths-csv", type=click.Path(exists=True, path_type=Path), help="CSV with a column GeneratedTokens.")
@click.option("--rounds", type=int, help="Measured rounds of each policy.")
@click.option("--groups", type=click.IntRange(1), help="Groups in a batch.")
@click.option("--samples", type=click.IntRange(2), help="Samples in a group.")
@click.option("--slots", type=click.IntRange(1), help="Slots of the engine.")
@click.option("--quick", is_flag=True, help="Small batches and few rounds: whether it works, not how fast it is.")
def main(
    json_file: Path | None,
    lengths_csv: Path | None,
    rounds: int | None,
    groups: int | None,
    samples: int | None,
    slots: int | None,
    quick: bool,
) -> None:
    """Measure policies of rounds on vLLM."""
    shape = QUICK if quick else FULL
    shape = replace(
        shape,
        rounds=rounds or shape.rounds,
        batch_groups=groups or shape.batch_groups,
        group_samples=samples or shape.group_samples,
        slots=slots or shape.slots,
    )
    workload = workload_of(lengths_csv, shape)
    tail = tail_of(workload)
    if tail < TAIL_WANTED:
        raise click.ClickException(f"p99/p50 of these lengths is {tail:.1f}: bring a list with {TAIL_WANTED:g} or more")
    share = shape.slots / (shape.batch_groups * shape.group_samples)
    report(
        f"Rounds on vLLM: {shape.batch_groups} x {shape.group_samples}, slots/samples {share:g}, p99/p50 {tail:.1f}",
        rows_of(run(POLICIES, workload, shape)),
        json_file,
    )


if __name__ == "__main__":
    main()
