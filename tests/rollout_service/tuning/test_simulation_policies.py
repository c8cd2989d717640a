"""Policies in the simulator: what each of them must do to rounds, and the controller on a run that drifts."""

from dataclasses import replace

import pytest

from protocol.settings.rollout import Admission, RoundOrder
from rollout_service.scheduler.decisions import RoundLimits
from rollout_service.tuning.controller import ControllerState, Direction, RoundMeasures, TuneBounds, step_controller
from rollout_service.tuning.engine_model import EngineModel
from rollout_service.tuning.forecast import LengthForecast
from rollout_service.tuning.frontier import FrontierPoint, TwoLevelWorkload, measure, off_policy_at
from rollout_service.tuning.results import RoundResult
from rollout_service.tuning.simulation import Simulation, TrainerModel
from rollout_service.tuning.workload import PromptLengths

N, SAMPLES = 16, 4
LIMITS = RoundLimits(N, SAMPLES, 1.5, lookahead=0, max_lag=16)
ENGINE = EngineModel(slots=16)
WORKLOAD = TwoLevelWorkload(60, 0.8, 0.5, 1000, num_prompts=64, seed=1)


def world(admission=Admission.FIXED, order=RoundOrder.FIFO, ratio=1.5, engine=ENGINE, forecast=True, **limits):
    changed = replace(LIMITS, admission=admission, order=order, ratio=ratio, **limits)
    return Simulation(changed, engine, TrainerModel(), WORKLOAD, LengthForecast(SAMPLES) if forecast else None)


@pytest.mark.parametrize("admission", Admission)
@pytest.mark.parametrize("order", RoundOrder)
def test_every_policy_fills_batches_and_trains_every_prompt_in_time(admission, order):
    simulated = world(admission, order, max_lag=6)
    simulated.run(30)
    assert len(simulated.batches) == 30
    assert max(lag for batch in simulated.batches for lag in batch.tokens_by_lag) <= 6
    for batch in simulated.batches:
        assert batch.num_samples == N * SAMPLES
        assert sum(batch.tokens_by_lag.values()) == sum(batch.lengths)


@pytest.mark.parametrize("order", RoundOrder)
def test_no_group_is_passed_over_for_ever(order):
    """The shortest prompts are last in line each round, and must be trained all the same."""
    simulated = world(order=order)
    simulated.run(40)
    assert max(batch.mean_start_age for batch in simulated.batches) < 4
    trained = sum(len(batch.lengths) for batch in simulated.batches) // SAMPLES
    assert sum(r.num_fresh for r in simulated.rounds) - trained <= 2 * N


def test_without_knowledge_every_order_is_that_of_admission():
    results = []
    for order in (RoundOrder.FIFO, RoundOrder.LONGEST_FIRST):
        simulated = world(order=order, ratio=1.0, forecast=False)
        simulated.run(6)
        results.append([batch.lengths for batch in simulated.batches])
    assert results[0] == results[1]


def test_longest_first_with_a_history_beats_order_of_admission_at_a_small_ratio():
    def points(order: RoundOrder) -> list[FrontierPoint]:
        ratios = (1.0, 1.0625, 1.125, 1.25, 1.5)
        limits = [replace(LIMITS, order=order, ratio=ratio) for ratio in ratios]
        return [measure(each, ENGINE, TrainerModel(), WORKLOAD, num_rounds=45) for each in limits]

    plain, longest = points(RoundOrder.FIFO), points(RoundOrder.LONGEST_FIRST)
    assert longest[0].throughput > plain[0].throughput
    compared = [(p.off_policy, off_policy_at(plain, p.throughput)) for p in longest[1:3]]
    assert all(known is not None and own < known for own, known in compared)


def test_a_budget_keeps_the_expected_context_within_the_cache():
    engine = EngineModel(slots=64, kv_tokens=3000)
    free, bound = world(Admission.REFILL, ratio=3.0, engine=engine), world(Admission.BUDGET, ratio=3.0, engine=engine)
    for simulated in (free, bound):
        simulated.run(20)
    late = [sum(r.num_preemptions for r in simulated.rounds[8:]) for simulated in (free, bound)]
    assert late[1] < late[0] / 2


def test_a_taper_starts_less_than_a_fixed_number():
    parked = {}
    for admission in (Admission.FIXED, Admission.TAPER):
        simulated = world(admission, ratio=3.0)
        simulated.run(30)
        parked[admission] = sum(r.parked_tokens for r in simulated.rounds[10:])
    assert parked[Admission.TAPER] < parked[Admission.FIXED]


class Drifting:
    """Lengths double half-way."""

    def __init__(self, at: int) -> None:
        self._at = at

    def prompt(self, index: int, num_samples: int) -> PromptLengths:
        prompt = WORKLOAD.prompt(index, num_samples)
        factor = 1 if index < self._at else 2
        return replace(prompt, lengths=tuple(factor * length for length in prompt.lengths))


def test_the_controller_answers_lengths_that_double_half_way_and_does_not_oscillate():
    """The KV cache that held what ran before is too small then: the ratio must come down, and stay down."""
    num_rounds, half = 160, 80
    engine = EngineModel(slots=48, kv_tokens=9_000)
    simulated = Simulation(replace(LIMITS, ratio=1.25), engine, TrainerModel(), Drifting(half * N))
    state = ControllerState(1.25)
    bounds = TuneBounds(max_ratio=3.0)
    log = []

    def decide(done: RoundResult) -> None:
        nonlocal state
        started = SAMPLES * done.num_fresh + done.num_resumes
        processed = done.reprefilled_tokens + done.dispatched_tokens
        measured = RoundMeasures(
            bubble=done.idle_slot_s / done.slot_s,
            reprefill=done.reprefilled_tokens / max(1, processed),
            preemptions=done.num_preemptions / max(1, started),
        )
        state, tuning = step_controller(state, measured, bounds)
        log.append(tuning)
        simulated.limits = simulated.scheduler.limits = replace(simulated.limits, ratio=tuning.ratio)

    simulated.on_round = decide
    simulated.run(num_rounds)
    before, after = log[half - 1].ratio, log[-1].ratio
    changes = [t for t in log[half:] if t.direction is not Direction.STAY]
    assert after < before
    assert "preempted" in changes[0].reason or "prefilled again" in changes[0].reason
    assert [t.direction for t in changes] == [Direction.DOWN] * len(changes)
    assert max(t.ratio for t in log[-30:]) / min(t.ratio for t in log[-30:]) < 1.05
    assert not [t for t in log[half // 2 : half] if t.direction is not Direction.STAY]
