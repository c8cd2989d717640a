"""Whether the simulator tells the truth: its prediction for each policy against the real engine.

The engine is calibrated first, as `april calibrate` does it, then the policies take their turns on it, and only then
is the simulator asked, with the lengths that they met and with nothing of what was measured of them. Goal: tokens/s
within 10 % for every policy, and the off-policy share within 0.05.

How many decode steps the rounds take depends on no clock, so it shows by itself whether the simulated rounds are those
of the service. The speed of a shared machine drifts by more than 10 % within minutes, so the engine alone, fed
endlessly, is measured around every turn, and a second column says how far a prediction is off without that drift.
"""

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.long_tail import (
    FULL,
    LONGEST,
    NUM_THREADS,
    POLICIES,
    QUICK,
    Measured,
    Policy,
    Shape,
    measure,
    workload_of,
)
from benchmarks.long_tail_parts.engine import PROMPT_TOKENS, endless_policy, pool_settings
from benchmarks.long_tail_parts.installs import install_s
from benchmarks.report import report
from protocol.settings import RunSettings
from rollout_service.engines.pool import EnginePool
from rollout_service.engines.vllm_engine import VllmEngine
from rollout_service.scheduler.decisions import RoundLimits
from rollout_service.tuning.calibrate import MEASURE_S
from rollout_service.tuning.calibrate import measure as measure_engine
from rollout_service.tuning.calibration import Calibration, fit
from rollout_service.tuning.closed_forms import ceiling_tokens_per_s
from rollout_service.tuning.engine_model import EngineModel
from rollout_service.tuning.forecast import LengthForecast
from rollout_service.tuning.simulation import Simulation, TrainerModel
from rollout_service.tuning.workload import PromptLengths, Workload

MAX_LAG = 8


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the simulator says of the rounds that were measured."""

    tokens_per_s: float
    off_policy: float
    steps: float


class _Named:
    """The workload with the names that the service knows its prompts by, so that they have the same history."""

    def __init__(self, workload: Workload, num_prompts: int) -> None:
        self._workload, self._num_prompts = workload, num_prompts

    def prompt(self, index: int, num_samples: int) -> PromptLengths:
        """Prompt number `index`."""
        prompt = self._workload.prompt(index, num_samples)
        return PromptLengths(prompt.lengths, PROMPT_TOKENS, "benchmark", f"p:{index % self._num_prompts}")


def predict(policy: Policy, engine: EngineModel, installs_s: float, workload: _Named, shape: Shape) -> Predicted:
    """Simulate the turns of one policy."""
    timed = _simulated(policy, engine, installs_s, workload, shape)
    stepped = _simulated(policy, EngineModel(engine.slots, 1.0, 0.0, 0.0, 0.0), 0.0, workload, shape)
    counted = timed.batches[shape.warm_up + 1 : shape.warm_up + shape.rounds + 1]
    tokens = sum(sum(batch.lengths) for batch in counted)
    lagging = sum(count for batch in counted for lag, count in batch.tokens_by_lag.items() if lag > 0)
    return Predicted(tokens / _seconds(timed, shape), lagging / tokens, _seconds(stepped, shape) / shape.rounds)


def _simulated(policy: Policy, engine: EngineModel, installs_s: float, workload: _Named, shape: Shape) -> Simulation:
    limits = RoundLimits(
        shape.batch_groups,
        shape.group_samples,
        policy.ratio,
        lookahead=0,
        max_lag=MAX_LAG,
        admission=policy.admission,
        order=policy.order,
    )
    world = Simulation(
        limits, engine, TrainerModel(install_s=installs_s), workload, LengthForecast(shape.group_samples)
    )
    world.run(shape.warm_up + shape.rounds + 1)
    return world


def _seconds(world: Simulation, shape: Shape) -> float:
    """Of the turns that count: turn t trains batch t + 1 and ends when batch t + 2 is offered."""
    return world.batches[shape.warm_up + shape.rounds].trained_s - world.batches[shape.warm_up].trained_s


async def _calibrated(base: RunSettings, model: Path, folder: Path) -> tuple[Calibration, float]:
    pool = EnginePool([VllmEngine(base, "engine-0")])
    await pool.start()
    try:
        stretches = await measure_engine(pool, base, 0, MEASURE_S, lambda _: None)
        return fit(stretches, pool.slots, 0), await install_s(pool, model, folder)
    finally:
        await pool.close()


async def _both(
    base: RunSettings, model: Path, folder: Path, workload: Workload, shape: Shape
) -> tuple[Calibration, float, Measured]:
    calibration, installs_s = await _calibrated(base, model, folder)
    return calibration, installs_s, await measure(POLICIES, base, workload, shape)


def rows_of(
    calibration: Calibration, installs_s: float, measured: Measured, workload: Workload
) -> list[dict[str, object]]:
    """Prediction and measurement side by side, and the engine alone: what is off there is the machine's drift."""
    rows: list[dict[str, object]] = []
    shape, engine = measured.shape, calibration.engine
    named = _Named(workload, shape.num_prompts)
    prompts = [named.prompt(index, shape.group_samples) for index in range(shape.num_prompts)]
    ceiling = ceiling_tokens_per_s(engine, prompts)
    for policy in measured.policies:
        turns = measured.turns[policy.name]
        predicted = predict(policy, engine, installs_s, named, shape)
        rows.append(
            {
                "policy": policy.name,
                "tokens/s": measured.rate(policy.name),
                "predicted": predicted.tokens_per_s,
                "off by": predicted.tokens_per_s / measured.rate(policy.name) - 1,
                "without drift": predicted.tokens_per_s / ceiling / measured.of_ceiling(policy.name) - 1,
                "of (d)": measured.of_ceiling(policy.name),
                "steps/round": sum(t.work.steps for t in turns) / len(turns),
                "its prediction": predicted.steps,
                "off-policy": sum(t.num_lagging for t in turns) / sum(t.num_tokens for t in turns),
                "and its prediction": predicted.off_policy,
            }
        )
    alone: dict[str, object] = dict.fromkeys(rows[0], "")
    alone |= {"policy": "(d) endless", "tokens/s": measured.ceiling, "predicted": ceiling}
    alone |= {"off by": ceiling / measured.ceiling - 1, "of (d)": 1.0}
    return [*rows, alone]


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the table as JSON.")
@click.option("--lengths-csv", type=click.Path(exists=True, path_type=Path), help="CSV with a column GeneratedTokens.")
@click.option("--quick", is_flag=True, help="Small batches and few rounds: whether it works, not how well.")
def main(json_file: Path | None, lengths_csv: Path | None, quick: bool) -> None:
    """Compare the simulator with the engine."""
    shape = QUICK if quick else FULL
    workload = workload_of(lengths_csv, shape)
    with tempfile.TemporaryDirectory(prefix="april-fidelity-") as temporary:
        folder = Path(temporary)
        model = endless_policy(folder / "model")
        base = pool_settings(model, folder, shape.slots, LONGEST, NUM_THREADS)
        calibration, installs_s, measured = asyncio.run(_both(base, model, folder, workload, shape))
    engine = calibration.engine
    click.echo(
        f"calibration: step {engine.step_base_s * 1e3:.2f} ms + {engine.step_per_sequence_s * 1e6:.0f} us a sequence + "
        f"{engine.step_per_context_token_s * 1e9:.1f} ns a context token, prefill "
        f"{engine.prefill_per_token_s * 1e6:.1f} us a token, install {installs_s:.2f} s, R2 {calibration.r_squared:.3f}"
    )
    report("Simulator against engine", rows_of(calibration, installs_s, measured, workload), json_file)


if __name__ == "__main__":
    main()
