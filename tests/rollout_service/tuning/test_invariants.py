"""What must hold of a simulated run without refill and drops, and of a full engine: found by simulation, held against
arithmetic."""

from statistics import fmean

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.settings.rollout import RoundOrder
from rollout_service.scheduler.decisions import RoundLimits
from rollout_service.tuning.closed_forms import ceiling_tokens_per_s, draw_prompts, full_engine, mean_start_age
from rollout_service.tuning.engine_model import EngineModel
from rollout_service.tuning.length_specs import parse_lengths
from rollout_service.tuning.lengths import SpecLengths
from rollout_service.tuning.simulation import Simulation, TrainerModel
from rollout_service.tuning.sweep import Point, Scenario, simulate_part

SKIPPED = 30  # rounds until the buffer is in its steady state


def simulation(
    ratio: float, spec: str, *, groups: int = 4, samples: int = 2, slots: int = 64, order: RoundOrder = RoundOrder.FIFO
) -> Simulation:
    """A bound on the lag that never binds, a trainer that takes no time."""
    limits = RoundLimits(groups, samples, ratio, 0, max_lag=1000, order=order)
    return Simulation(limits, EngineModel(slots), TrainerModel(), parse_lengths(spec, seed=1))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    extra=st.integers(0, 8),
    sigma=st.floats(0.2, 1.5),
    samples=st.integers(1, 4),
    slots=st.sampled_from([16, 64]),
)
def test_conservation(extra: int, sigma: float, samples: int, slots: int) -> None:
    groups = 4
    ratio = 1 + extra / groups
    world = simulation(ratio, f"lognormal:median=40,sigma={sigma},max=1000", samples=samples, slots=slots)
    world.run(SKIPPED + 60)
    in_flight = groups + extra
    rounds = world.rounds[SKIPPED:]
    if slots >= in_flight * samples:  # all of N' are admitted at the start of a round
        for this in rounds:
            assert this.parked_groups + this.surplus_groups == in_flight - groups
        assert fmean(this.num_fresh for this in rounds) == pytest.approx(groups, rel=0.02)
        ages = [batch.mean_start_age for batch in world.batches[SKIPPED:]]
        assert fmean(ages) == pytest.approx(mean_start_age(in_flight, groups), abs=0.06 * max(1.0, ratio))


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ratio=st.sampled_from([1.0, 1.5, 2.0]), order=st.sampled_from([RoundOrder.FIFO, RoundOrder.FEWEST_OPEN]))
def test_everything_dispatched_is_trained_or_in_flight(ratio: float, order: RoundOrder) -> None:
    world = simulation(ratio, "lognormal:median=40,sigma=1,max=1000", order=order)
    world.run(80)
    trained = sum(sum(batch.lengths) for batch in world.batches)
    by_lag = sum(sum(batch.tokens_by_lag.values()) for batch in world.batches)
    assert by_lag == trained, "every trained token has one lag"
    dispatched = sum(this.dispatched_tokens for this in world.rounds)
    in_flight = dispatched - trained
    assert in_flight >= 0
    assert in_flight <= (ratio - 1) * 4 * 2 * 1000 + 1e-9
    long_run = fmean(length for batch in world.batches for length in batch.lengths)
    mean_dispatched = dispatched / (sum(this.num_fresh for this in world.rounds) * 2)
    assert long_run == pytest.approx(mean_dispatched, rel=0.15), "the tail is trained on, too"


def test_trained_mean_is_the_dispatched_mean_in_the_long_run() -> None:
    lengths = SpecLengths("test", parse_lengths("lognormal:median=40,sigma=1,max=1000"))
    scenario = Scenario(lengths, EngineModel(64), TrainerModel(), 4, 2)
    part = simulate_part(scenario, Point(2.0), 800, 0)
    dispatched = part.dispatched_tokens / (part.num_fresh * 2)
    assert part.trained_tokens / part.trained_samples == pytest.approx(dispatched, rel=0.02)


def test_a_synchronous_round_takes_as_long_as_its_longest_response() -> None:
    world = simulation(1.0, "lognormal:median=40,sigma=1", slots=8)
    world.run(20)
    for index, this in enumerate(world.rounds[:20]):
        longest = max(max(world.workload.prompt(index * 4 + k, 2).lengths) for k in range(4))
        assert this.ended_s - this.started_s >= longest * world.engine.step_base_s
    assert all(batch.tokens_by_lag.keys() == {0} for batch in world.batches)


@pytest.mark.parametrize(("groups", "slots"), [(8, 32), (16, 32)])
def test_closed_forms_of_a_full_engine(groups: int, slots: int) -> None:
    lengths = SpecLengths("test", parse_lengths("lognormal:median=60,between=0.6,within=0.6,max=1500"))
    scenario = Scenario(lengths, EngineModel(slots, prefill_per_token_s=0.0), TrainerModel(), groups, 4)
    part = simulate_part(scenario, Point(8.0), 300, 0)
    assert part.idle_slot_s / part.slot_s < 0.02, "ratio 8 keeps it full"
    prompts = draw_prompts(lengths.workload(7, bootstrap=False), 4)
    predicted = full_engine(scenario.engine, prompts, groups)
    lags = part.tokens_by_lag
    share = 1 - lags[0] / lags.total()
    mean_lag = sum(lag * count for lag, count in lags.items()) / lags.total()
    # Waiting as READY, and started samples of a group that wait for slots, make the truth a little staler.
    assert predicted.off_policy_share == pytest.approx(share, abs=0.06)
    assert predicted.mean_lag == pytest.approx(mean_lag, rel=0.25)
    assert part.tokens_per_s == pytest.approx(predicted.ceiling_tokens_per_s, rel=0.05)


def test_ceiling_knows_prefill_context_and_kv_room() -> None:
    spec = SpecLengths("test", parse_lengths("lognormal:median=100,sigma=0.5,prompt=50"))
    prompts = draw_prompts(spec.workload(0, bootstrap=False), 4)
    free = EngineModel(32, prefill_per_token_s=0.0)
    assert ceiling_tokens_per_s(free, prompts) == pytest.approx(32 / free.step_s(32, 0))
    costly = EngineModel(32, prefill_per_token_s=1e-3)
    assert ceiling_tokens_per_s(costly, prompts) < 0.8 * ceiling_tokens_per_s(free, prompts)
    tight = EngineModel(32, prefill_per_token_s=0.0, kv_tokens=800)
    assert ceiling_tokens_per_s(tight, prompts) < 0.5 * ceiling_tokens_per_s(free, prompts)
