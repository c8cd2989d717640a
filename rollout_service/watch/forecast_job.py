"""What other ratios would do, by the simulator with the run's own lengths: a job of plain data, done in any process.

Always true: a large run is simulated at a smaller size (as many slots for each sample of a batch, steps as long), so
that a job costs seconds whatever the run's size; what it says of tokens is scaled back.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from protocol.errors import AprilError, DataError
from protocol.settings import RunSettings, smallest_max_lag
from protocol.settings.rollout import Admission, RoundOrder
from protocol.watching import Predicted
from rollout_service.tuning.closed_forms import draw_prompts, full_engine
from rollout_service.tuning.engine_model import EngineModel
from rollout_service.tuning.lengths import FlatLengths, GroupedLengths, LengthSource
from rollout_service.tuning.recommend import UserLimits, base_of, recommend
from rollout_service.tuning.simulation import TrainerModel
from rollout_service.tuning.sweep import Point, PointResult, Scenario, speed_up, sweep
from rollout_service.tuning.trace_reader import Trace
from rollout_service.tuning.trace_scenario import Given, Known, prepare
from rollout_service.tuning.workload import PromptLengths
from rollout_service.watch.observed import Choices

RATIOS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
MIN_SAMPLES = 100  # finished ones: fewer say nothing of a tail
MAX_GROUPS = 2_000  # drawn from; more lengths change nothing that can be seen
SIMULATED_SAMPLES = 128  # of a batch at the most; the shape of a round hardly depends on it
FEW_ROUNDS, MANY_ROUNDS = 8, 32
BUDGET_S = 4.0  # of one core for all ratios; few rounds first, many if they fit


def make_job(trace: Trace, choices: Choices, settings: RunSettings | None, folder: Any = None) -> dict[str, Any]:
    """The job. Raises DataError that says what is missing."""
    num_finished = sum(sample.finished for sample in trace.samples)
    if num_finished < MIN_SAMPLES:
        raise DataError(f"{num_finished} responses have finished, a prediction needs {MIN_SAMPLES}")
    if len(trace.samples) > MAX_GROUPS * 8:
        trace = replace(trace, samples=trace.samples[-MAX_GROUPS * 8 :])
    scenario = prepare(Known(trace.limits, settings, trace, folder), None, Given()).scenario
    lengths = scenario.lengths
    assert isinstance(lengths, FlatLengths | GroupedLengths), "of a trace"
    ratios = sorted({*RATIOS, choices.ratio})
    return {
        "lengths": _lengths_json(lengths),
        "engine": asdict(scenario.engine),
        "trainer": asdict(scenario.trainer),
        "batch_groups": scenario.batch_groups,
        "group_samples": scenario.group_samples,
        "ratios": [r for r in ratios if smallest_max_lag(r, choices.lookahead) <= choices.max_lag],
        "lookahead": choices.lookahead,
        "max_lag": choices.max_lag,
        "admission": trace.limits.admission if trace.limits else Admission.FIXED.value,
        "order": trace.limits.order if trace.limits else RoundOrder.FIFO.value,
    }


def do_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Predictions by ratio, what is recommended and why. What can't be recommended is said in `note`."""
    scenario, size = _scenario(job)
    points = [
        Point(ratio, Admission(job["admission"]), RoundOrder(job["order"]), job["lookahead"]) for ratio in job["ratios"]
    ]
    began_s = time.process_time()
    results = list(sweep(scenario, points, FEW_ROUNDS, num_processes=1))
    num_rounds = FEW_ROUNDS
    if (time.process_time() - began_s) * 2 < BUDGET_S:  # most of a part is its warm-up
        num_rounds = MANY_ROUNDS
        results = list(sweep(scenario, points, num_rounds, num_processes=1))
    answer: dict[str, Any] = {"predicted": _predicted(results, size), "num_rounds": num_rounds, "note": None}
    prompts = draw_prompts(scenario.lengths.workload(0, False), scenario.group_samples)
    ceiling = full_engine(scenario.engine, prompts, scenario.batch_groups).ceiling_tokens_per_s
    try:
        found = recommend(results, UserLimits(max_lag=job["max_lag"]), ceiling)
    except AprilError as error:
        return answer | {"recommended": None, "reason": None, "note": str(error)}
    return answer | {"recommended": found.point.ratio, "reason": found.reason}


def _predicted(results: Sequence[PointResult], size: float) -> list[dict[str, float]]:
    base = base_of(results)
    return [
        Predicted(
            ratio=result.point.ratio,
            speed_up=speed_up(result, base)[0],
            tokens_per_s=result.tokens_per_s * size,
            off_policy_share=result.off_policy_share,
            bubble_share=result.bubble_share,
            mean_lag=result.mean_lag,
        ).model_dump()
        for result in results
    ]


def _scenario(job: Mapping[str, Any]) -> tuple[Scenario, float]:
    """At a size that costs seconds, and how many times larger the run is."""
    groups, samples = job["batch_groups"], job["group_samples"]
    smaller = (
        max(1, min(groups, math.floor(SIMULATED_SAMPLES / samples))) if groups * samples > SIMULATED_SAMPLES else groups
    )
    size = groups / smaller
    engine = EngineModel(**job["engine"])
    engine = replace(
        engine,
        slots=max(1, round(engine.slots / size)),
        kv_tokens=int(engine.kv_tokens / size),
        step_per_sequence_s=engine.step_per_sequence_s * size,
        step_per_context_token_s=engine.step_per_context_token_s * size,
        prefill_per_token_s=engine.prefill_per_token_s * size,
    )
    trainer = TrainerModel(**job["trainer"])
    return Scenario(_lengths(job["lengths"]), engine, trainer, smaller, samples, job["max_lag"]), size


def _lengths_json(lengths: FlatLengths | GroupedLengths) -> dict[str, Any]:
    if isinstance(lengths, FlatLengths):
        return {"flat": list(lengths.lengths), "prompt_tokens": list(lengths.prompt_tokens)}
    prompts = lengths.prompts[-MAX_GROUPS:]
    return {"groups": [[list(p.lengths), p.prompt_tokens, p.data_source, p.prompt_id] for p in prompts]}


def _lengths(data: Mapping[str, Any]) -> LengthSource:
    if "flat" in data:
        return FlatLengths("the run", tuple(data["flat"]), tuple(data["prompt_tokens"]))
    return GroupedLengths("the run", tuple(PromptLengths(tuple(g[0]), g[1], g[2], g[3]) for g in data["groups"]))
