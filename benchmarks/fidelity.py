"""Whether the simulator tells the truth: its prediction for each policy against the real engine.

The engine is calibrated first (steps, prefills, an install, and what a resumed sample costs, from some rounds at ratio
2), then the policies take their turns on it, and only then is the simulator asked, with the lengths that they met and
with nothing of what was measured of them. Goal: tokens/s within 10 % for every policy, and the off-policy share within
0.05. The speed of a shared machine drifts by more than that within minutes, so the engine alone, fed endlessly, is
measured in every round, and a second column says how far a prediction is off once that drift is taken out.
"""

import asyncio
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np

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
from benchmarks.long_tail_parts.calibrate import calibrate, install_s
from benchmarks.long_tail_parts.engine import endless_policy, pool_settings
from benchmarks.report import report
from protocol.settings import RunSettings
from rollout_service.engines.pool import EnginePool
from rollout_service.engines.vllm_engine import VllmEngine
from rollout_service.scheduler.decisions import RoundLimits
from rollout_service.tuning.calibration import Calibration
from rollout_service.tuning.closed_forms import ceiling_tokens_per_s
from rollout_service.tuning.forecast import LengthForecast
from rollout_service.tuning.simulation import Simulation, TrainerModel
from rollout_service.tuning.workload import PromptLengths, Workload

MAX_LAG = 8


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the simulator says of the rounds that were measured. `num_resumes`: of samples, for each round."""

    tokens_per_s: float
    off_policy: float
    num_resumes: float


class _Named:
    """The workload with the names that the service knows its prompts by, so that they have the same history."""

    def __init__(self, workload: Workload, num_prompts: int) -> None:
        self._workload, self._num_prompts = workload, num_prompts

    def prompt(self, index: int, num_samples: int) -> PromptLengths:
        """Prompt number `index`."""
        prompt = self._workload.prompt(index, num_samples)
        return PromptLengths(prompt.lengths, 24, "benchmark", f"p:{index % self._num_prompts}")


def predict(policy: Policy, calibration: Calibration, installs_s: float, workload: Workload, shape: Shape) -> Predicted:
    """Simulate the turns of one policy: turn t trains batch t + 1 and ends when batch t + 2 is offered."""
    limits = RoundLimits(
        shape.batch_groups,
        shape.group_samples,
        policy.ratio,
        lookahead=0,
        max_lag=MAX_LAG,
        admission=policy.admission,
        order=policy.order,
    )
    named = _Named(workload, shape.num_prompts)
    forecast = LengthForecast(shape.group_samples)
    world = Simulation(limits, calibration.engine, TrainerModel(install_s=installs_s), named, forecast)
    world.run(shape.warm_up + shape.rounds + 1)
    first, last = world.batches[shape.warm_up], world.batches[shape.warm_up + shape.rounds]
    counted = world.batches[shape.warm_up + 1 : shape.warm_up + shape.rounds + 1]
    tokens = sum(sum(batch.lengths) for batch in counted)
    lagging = sum(count for batch in counted for lag, count in batch.tokens_by_lag.items() if lag > 0)
    resumes = sum(round_.num_resumes for round_ in world.rounds[shape.warm_up + 1 :]) / max(1, shape.rounds)
    return Predicted(tokens / (last.trained_s - first.trained_s), lagging / tokens, resumes)


async def _calibrated(base: RunSettings, model: Path, folder: Path) -> tuple[Calibration, float]:
    pool = EnginePool([VllmEngine(base, "engine-0")])
    await pool.start()
    try:
        return await calibrate(pool, LONGEST), await install_s(pool, model, folder)
    finally:
        await pool.close()


async def _both(
    base: RunSettings, model: Path, folder: Path, workload: Workload, shape: Shape
) -> tuple[Calibration, float, Measured]:
    calibration, installs_s = await _calibrated(base, model, folder)
    resume_s = await _resume_s(base, workload, shape, calibration, installs_s)
    calibration = replace(calibration, engine=replace(calibration.engine, resume_s=resume_s))
    return calibration, installs_s, await measure(POLICIES, base, workload, shape)


async def _resume_s(
    base: RunSettings, workload: Workload, shape: Shape, calibration: Calibration, installs_s: float
) -> float:
    """Seconds that a resumed sample costs beyond its prefill: what rounds at ratio 2 take longer than simulated.

    The simulated time is that of the machine's speed in these rounds, by the engine fed endlessly beside them.
    """
    trial = Policy("resumes", 2.0)
    aside = base.model_copy(update={"run": base.run.model_copy(update={"dir": base.run_dir / "trial"})})
    measured = await measure((trial,), aside, workload, shape)
    turns = measured.turns[trial.name]
    predicted = predict(trial, calibration, installs_s, workload, shape)
    rate = predicted.tokens_per_s / _drift(calibration, measured, workload)
    late_s = sum(turn.seconds for turn in turns) - sum(turn.num_tokens for turn in turns) / rate
    return max(0.0, late_s / len(turns) / max(1.0, predicted.num_resumes))


def rows_of(
    calibration: Calibration, installs_s: float, measured: Measured, workload: Workload
) -> list[dict[str, object]]:
    """Prediction and measurement side by side."""
    rows: list[dict[str, object]] = []
    drift = _drift(calibration, measured, workload)
    for policy in measured.policies:
        turns = measured.turns[policy.name]
        tokens = sum(turn.num_tokens for turn in turns)
        rate = tokens / sum(turn.seconds for turn in turns)
        off_policy = sum(turn.num_lagging for turn in turns) / tokens
        predicted = predict(policy, calibration, installs_s, workload, measured.shape)
        rows.append(
            {
                "policy": policy.name,
                "tokens/s": rate,
                "predicted": predicted.tokens_per_s,
                "off by": predicted.tokens_per_s / rate - 1,
                "without drift": predicted.tokens_per_s / rate / drift - 1,
                "off-policy": off_policy,
                "its prediction": predicted.off_policy,
            }
        )
    rows.append(_ceiling_row(calibration, measured, workload))
    return rows


def _ceiling(calibration: Calibration, measured: Measured, workload: Workload) -> float:
    """Tokens/s of the engine alone, fed endlessly, as calibrated."""
    prompts = [workload.prompt(index, measured.shape.group_samples) for index in range(measured.shape.num_prompts)]
    return ceiling_tokens_per_s(calibration.engine, prompts)


def _drift(calibration: Calibration, measured: Measured, workload: Workload) -> float:
    """How much faster the engine alone was when it was calibrated than beside these rounds."""
    return _ceiling(calibration, measured, workload) / float(np.median(measured.ceiling))


def _ceiling_row(calibration: Calibration, measured: Measured, workload: Workload) -> dict[str, object]:
    """The engine without any service: what is off here is the calibration's fault, or the machine's."""
    rate, predicted = float(np.median(measured.ceiling)), _ceiling(calibration, measured, workload)
    row: dict[str, object] = {"policy": "(d) endless", "tokens/s": rate, "predicted": predicted}
    return row | {"off by": predicted / rate - 1, "without drift": "", "off-policy": "", "its prediction": ""}


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
        f"{engine.prefill_per_token_s * 1e6:.1f} us a token, install {installs_s:.2f} s, a resume "
        f"{engine.resume_s * 1e3:.1f} ms, R2 {calibration.r_squared:.3f}"
    )
    report("Simulator against engine", rows_of(calibration, installs_s, measured, workload), json_file)


if __name__ == "__main__":
    main()
