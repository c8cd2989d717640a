"""Rounds: order, admission, must-finish, cut, lag, and that they always go on."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.settings import smallest_max_lag
from protocol.settings.rollout import Admission, Cut, OnInstall, RoundOrder
from rollout_service.scheduler.admission import Demand, Outlook, fitting, tapered
from rollout_service.scheduler.decisions import Admit, BeginRound, Install, OfferBatch, Park, RoundLimits, Start
from tests.rollout_service.scheduler.world import World


def limits(**changes) -> RoundLimits:
    return RoundLimits(**{"batch_groups": 4, "group_samples": 2, "ratio": 2.0, "lookahead": 0, "max_lag": 4} | changes)


def run_rounds(world: World, steps: int, max_ticks: int = 100_000) -> None:
    """A trainer that takes no time."""
    world.act()
    for _ in range(max_ticks):
        if len(world.trained) >= steps:
            return
        if world.lease():
            world.train()
        else:
            world.tick()
    raise AssertionError(f"stuck after {len(world.trained)} steps, waiting for {world.scheduler.waits}")


def test_first_round_admits_the_over_provisioned_number_of_groups():
    world = World(limits(), slots=100)
    world.act()
    assert world.log == [BeginRound(1, 8), Admit(8), Start(tuple(f"g{g}.{i}" for g in range(1, 9) for i in range(2)))]


def test_deciding_again_without_news_decides_nothing():
    world = World(limits(), slots=100)
    decisions = world.scheduler.decide(world.seen)
    assert decisions[1:] == [Admit(8)]
    assert world.scheduler.decide(world.seen) == []


def test_no_more_samples_are_started_than_there_are_slots():
    world = World(limits(), slots=5)
    world.act()
    assert sum(len(d.sample_ids) for d in world.log if isinstance(d, Start)) == 5
    assert sum(d.num_groups for d in world.log if isinstance(d, Admit)) == 3


def test_cut_parks_stragglers_before_the_batch_is_offered():
    world = World(limits(), slots=100)
    run_rounds(world, 1)
    kinds = [type(d) for d in world.log]
    assert kinds.index(Park) < kinds.index(OfferBatch)
    assert world.log[kinds.index(Park)].cut


def test_parked_samples_are_resumed_before_new_groups_are_admitted():
    world = World(limits(), slots=100)
    run_rounds(world, 1)
    second = next(i for i, d in enumerate(world.log) if isinstance(d, BeginRound) and d.number == 2)
    starts = [d for d in world.log[second:] if isinstance(d, Start)]
    parked = {s.sample_id for g in world.groups.values() for s in g.samples if 0 in s.tokens and not s.done}
    assert parked
    assert set(starts[0].sample_ids) >= parked
    assert isinstance(world.log[second + 1], Start)


def test_resume_order_is_oldest_version_first_then_admission():
    world = World(limits(), slots=1)
    table = world.scheduler.table
    table.add("g1", 1, [("g1.0", 0)], 3)
    table.add("g2", 2, [("g2.0", 0)], 1)
    table.add("g3", 3, [("g3.0", 0)], None)
    table.add("g4", 4, [("g4.0", 0)], 1)
    assert table.take(9, 3) == ("g2.0", "g4.0", "g1.0", "g3.0")


def test_a_dropped_group_is_replaced_by_exactly_one():
    world = World(limits(), slots=100)
    world.act()
    world.log.clear()
    world.drop("g3")
    assert [d for d in world.log if isinstance(d, Admit)] == [Admit(1)]


def test_surplus_counts_towards_the_next_round():
    world = World(limits(), slots=100)
    world.see(ready=3)
    assert world.scheduler.decide(world.seen)[1:] == [Admit(5)]


def test_a_full_surplus_is_offered_at_once():
    world = World(limits(), slots=100)
    world.groups.clear()
    world.see(ready=4)
    decisions = world.scheduler.decide(world.seen)
    assert decisions == [BeginRound(1, 8), OfferBatch(1)]


def test_synchronous_form_waits_until_the_step_is_trained_and_its_version_active():
    world = World(limits(lookahead=0), slots=100)
    world.act()
    while not world.batches:
        world.tick()
    assert world.scheduler.waits[0].startswith("the trainer: 1 batches")
    world.lease()
    assert world.scheduler.decide(world.seen) == []
    world.see(leased_untrained=0, trained_step=1, newest_version=1, newest_step=1, pending_version=1)
    assert world.scheduler.decide(world.seen) == [Install(1, keep=False)]


def test_a_step_trained_without_publishing_does_not_hold_up_the_rounds():
    world = World(limits(ratio=1, lookahead=0, max_lag=0), slots=100)
    world.act()
    while not world.batches:
        world.tick()
    world.lease()
    world.see(leased_untrained=0, trained_step=1)
    assert world.scheduler.decide(world.seen)[0] == BeginRound(2, 4)


def test_lookahead_lets_the_next_round_start_before_the_step_is_trained():
    world = World(limits(lookahead=1), slots=100)
    world.act()
    while not world.batches:
        world.tick()
    assert world.scheduler.phase == "filling"
    assert world.scheduler.round == 2


def test_nothing_starts_while_an_install_runs():
    world = World(limits(), slots=100)
    world.see(pending_version=1, newest_version=1, newest_step=0)
    assert world.scheduler.decide(world.seen) == [Install(1, keep=False)]
    assert world.scheduler.decide(world.seen) == []
    world.scheduler.installed()
    world.see(pending_version=None, active_version=1)
    assert isinstance(world.scheduler.decide(world.seen)[0], BeginRound)


def test_pause_parks_what_runs_and_lets_installs_through():
    world = World(limits(), slots=100)
    world.act()
    world.tick()
    world.see(generation_allowed=False, pending_version=1, newest_version=1)
    world.log.clear()
    world.act()
    assert [type(d) for d in world.log] == [Park, Install]
    assert world.scheduler.waits == ("the operator: generation is paused",)
    world.see(generation_allowed=True)
    world.act()
    run_rounds(world, 2)


def test_a_lowered_ratio_drops_nothing():
    world = World(limits(), slots=100)
    world.act()
    world.scheduler.limits = limits(ratio=1.0)
    in_flight = len(world.groups)
    world.tick()
    assert len(world.groups) == in_flight
    run_rounds(world, 3)


def test_cut_continue_lets_stragglers_run_on():
    world = World(limits(cut=Cut.CONTINUE, lookahead=2), slots=100)
    world.act()
    while not world.batches:
        world.tick()
    assert not [d for d in world.log if isinstance(d, Park)]
    assert world.scheduler.round == 2


def test_keep_installs_with_samples_running():
    world = World(limits(cut=Cut.CONTINUE, lookahead=3, on_install=OnInstall.KEEP), slots=100)
    world.act()
    while not world.batches:
        world.tick()
    world.lease()
    world.train()
    while not any(isinstance(d, Install) for d in world.log):
        world.tick()
        if world.batches:
            world.lease()
    install = next(i for i, d in enumerate(world.log) if isinstance(d, Install))
    assert world.log[install].keep


def test_rollback_suspends_the_round_until_versions_catch_up():
    world = World(limits(lookahead=1, max_lag=2), slots=100)
    world.act()
    world.tick()
    world.see(newest_version=9, newest_step=0, last_leased_step=8, leased_untrained=8)
    world.act()
    assert world.scheduler.phase == "idle"
    assert any("behind what the next batch is trained on" in w for w in world.scheduler.waits)


@settings(max_examples=200, deadline=None)
@given(
    batch_groups=st.integers(1, 6),
    group_samples=st.integers(1, 4),
    ratio=st.one_of(st.just(1.0), st.floats(1, 3.5)),
    lookahead=st.sampled_from([0, 0, 1, 2, 3]),
    extra_lag=st.sampled_from([0, 0, 1, 3]),
    slots=st.integers(1, 40),
    cut=st.sampled_from(Cut),
    admission=st.sampled_from(Admission),
    order=st.sampled_from(RoundOrder),
    kv_tokens=st.sampled_from([0, 0, 30, 300]),
    seed=st.integers(0, 10_000),
    data=st.data(),
)
def test_rounds_go_on_and_no_trained_token_is_older_than_max_lag(
    batch_groups, group_samples, ratio, lookahead, extra_lag, slots, cut, admission, order, kv_tokens, seed, data
):
    max_lag = smallest_max_lag(ratio, lookahead) + extra_lag
    round_limits = RoundLimits(
        batch_groups, group_samples, ratio, lookahead, max_lag, cut=cut, admission=admission, order=order
    )
    world = World(round_limits, slots, seed)
    world.see(kv_tokens=kv_tokens, forecast=world)
    world.act()
    world.live(data.draw, num_trained=8)
    for version, groups in world.trained:
        for group in groups:
            assert version - group.oldest <= max_lag
    target = math.ceil(ratio * batch_groups)
    if admission in (Admission.FIXED, Admission.TAPER):
        assert len(world.groups) <= target + batch_groups * (lookahead + 1)


@pytest.mark.parametrize(("ratio", "lookahead", "expected"), [(1, 0, 0), (2, 0, 1), (1.25, 1, 2), (3, 2, 4)])
def test_smallest_lag_bound(ratio, lookahead, expected):
    assert smallest_max_lag(ratio, lookahead) == expected


def test_a_sample_that_makes_its_group_urgent_is_not_queued_again():
    world = World(limits(ratio=1, lookahead=0, max_lag=0), slots=100)
    world.act()
    table = world.scheduler.table
    assert world.scheduler.num_must_finish(world.seen) == 4
    assert len(table.running) == 8
    assert table.num_waiting == 0


def test_no_more_groups_are_admitted_than_the_buffer_has_room_for():
    world = World(limits(), slots=100)
    world.see(admission_room=3)
    assert world.scheduler.decide(world.seen)[1:] == [Admit(3)]
    world = World(limits(), slots=100)
    world.see(admission_room=0)
    assert not [d for d in world.scheduler.decide(world.seen) if isinstance(d, Admit)]
    assert any("room in the buffer" in wait for wait in world.scheduler.waits)


def test_longest_first_admits_the_whole_round_and_starts_the_longest_groups():
    world = World(limits(ratio=1.0, order=RoundOrder.LONGEST_FIRST), slots=4)
    world.predict = lambda seq: Outlook([0, 5.0, 40.0, 10.0, 80.0][seq])
    world.act()
    assert world.log == [BeginRound(1, 4), Admit(4), Start(("g4.0", "g4.1", "g2.0", "g2.1"))]


def test_a_group_that_was_passed_over_for_a_round_comes_before_new_longer_ones():
    world = World(limits(order=RoundOrder.LONGEST_FIRST), slots=1)
    table = world.scheduler.table
    table.add("g1", 1, [("g1.0", 0)], None, Outlook(longest=5.0))
    table.new_round()
    table.add("g2", 2, [("g2.0", 0)], None, Outlook(longest=500.0))
    table.add("g3", 3, [("g3.0", 0)], 0, Outlook(longest=1.0))
    assert table.take(9, 3) == ("g3.0", "g1.0", "g2.0")


def test_fewest_open_groups_runs_those_that_lack_fewest_samples():
    world = World(limits(order=RoundOrder.FEWEST_OPEN), slots=1)
    table = world.scheduler.table
    table.add("g1", 1, [("g1.0", 0), ("g1.1", 1), ("g1.2", 2)], 0)
    table.add("g2", 2, [("g2.0", 0), ("g2.1", 1), ("g2.2", 2)], 0)
    table.take_of("g2", 2, 0)
    table.end("g2.0")
    table.end("g2.1")
    assert table.take(2, 0) == ("g2.2", "g1.0")


def test_a_budget_starts_only_what_fits_into_the_cache_and_never_nothing():
    world = World(limits(ratio=3.0, admission=Admission.BUDGET), slots=100)
    world.predict = lambda _: Outlook(longest=50.0, context=40.0)
    world.see(kv_tokens=400)
    world.act()
    assert len(world.scheduler.table.running) > 0
    first = [d for d in world.log if isinstance(d, Start)]
    assert len(world.scheduler.table.running) == fitting(400, 0, 40.0) or len(first) == 1
    tiny = World(limits(ratio=1.0, admission=Admission.BUDGET), slots=100)
    tiny.predict = lambda _: Outlook(longest=50.0, context=1000.0)
    tiny.see(kv_tokens=400)
    run_rounds(tiny, 2)


@settings(deadline=None)
@given(
    missing=st.integers(0, 6),
    finish=st.lists(st.floats(1, 100), max_size=10).map(sorted),
    upcoming=st.lists(st.floats(1, 200), max_size=10),
    most=st.integers(0, 10),
)
def test_a_taper_takes_what_the_batch_lacks_and_of_the_rest_only_what_will_finish_before_it_is_full(
    missing, finish, upcoming, most
):
    demand = Demand(batch_groups=6, target=12, in_flight=len(finish), unspoken=6 - missing)
    admitted = tapered(demand, most, finish, upcoming)
    possible = min(most, len(upcoming))
    assert admitted <= possible
    needed = max(0, missing - len(finish))
    assert admitted >= min(needed, possible)
    for number in range(needed, admitted if missing else needed):
        full_after = sorted([*finish, *upcoming[:number]])[missing - 1]
        assert upcoming[number] <= full_after
    if missing and needed <= admitted < possible:
        assert upcoming[admitted] > sorted([*finish, *upcoming[:admitted]])[missing - 1]


def test_the_context_that_runs_is_that_of_the_samples_that_run():
    world = World(limits(order=RoundOrder.LONGEST_FIRST), slots=5)
    world.predict = lambda seq: Outlook(longest=seq, context=10.0 * seq)
    world.act()
    for _ in range(60):
        world.tick()
        if world.lease():
            world.train()
        table = world.scheduler.table
        expected = sum(table.groups[s.split(".")[0]].outlook.context for s in table.running)
        assert table.running_context == pytest.approx(expected)
        assert table.mean_context * len(table.groups) == pytest.approx(
            sum(g.outlook.context for g in table.groups.values())
        )
