"""Groups that start more samples than they want: what goes on in a later epoch keeps `max_lag`, and rounds go on."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.settings import smallest_max_lag
from protocol.settings.rollout import Admission, Cut, RoundOrder
from rollout_service.scheduler.deadlines import Ages
from rollout_service.scheduler.decisions import Admit, Decision, OfferBatch, RoundLimits, Start
from tests.rollout_service.scheduler.test_rounds import run_rounds
from tests.rollout_service.scheduler.world import FakeGroup, FakeSample, World


class RacingWorld(World):
    """The first n of a group's n' samples make it; the others go on when their prompt comes up again."""

    def __init__(self, limits: RoundLimits, slots: int, seed: int, num_prompts: int) -> None:
        super().__init__(limits, slots, seed)
        self.num_prompts = num_prompts
        self.pool: dict[int, list[list[int]]] = {}
        self.continued = 0
        self.stale = 0

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Admit(count, oldest_version):
                for _ in range(count):
                    self._admit(oldest_version)
            case OfferBatch():
                self.batches.append([])
                self.see(offered=self.seen.offered + 1)
                self.scheduler.offered()
            case _:
                super()._carry_out(decision)

    def lease(self) -> bool:
        """As the buffer does it: what the batch is made of is decided when it is leased, oldest tokens first."""
        if self.batches:
            ready = sorted((g for g in self.groups.values() if g.ready_seq), key=lambda g: (g.oldest, g.ready_seq))
            self.batches[0] = ready[: self.limits.batch_groups]
            assert len(self.batches[0]) == self.limits.batch_groups
            for group in self.batches[0]:
                del self.groups[group.group_id]
        return super().lease()

    def _admit(self, oldest_version: int) -> None:
        self.seq += 1
        pooled = self.pool.pop(self.seq % self.num_prompts, [])
        taken = [tokens for tokens in pooled if tokens[0] >= oldest_version][: self.limits.started_samples]
        self.continued += len(taken)
        self.stale += len(pooled) - len(taken)
        prefixes = taken + [[] for _ in range(self.limits.started_samples - len(taken))]
        samples = [FakeSample(f"g{self.seq}.{i}", i, self._length(p), p) for i, p in enumerate(prefixes)]
        self.groups[f"g{self.seq}"] = FakeGroup(f"g{self.seq}", self.seq, samples)
        oldest = min((tokens[0] for tokens in taken), default=None)
        ids = [(s.sample_id, s.index) for s in samples]
        self.scheduler.admitted(f"g{self.seq}", self.seq, ids, self.predict(self.seq), oldest)
        self.see(num_pooled=sum(map(len, self.pool.values())))

    def _length(self, tokens: list[int]) -> int:
        return len(tokens) + max(1, int(self.rng.lognormvariate(2, 1)))

    def _grow(self, group: FakeGroup, sample: FakeSample) -> None:
        sample.tokens.append(self.seen.active_version)
        if len(sample.tokens) < sample.length:
            return
        sample.running, sample.done = False, True
        self.scheduler.ended(sample.sample_id)
        if sum(s.done for s in group.samples) < self.limits.group_samples:
            return
        # Those that leave stay in the fake group, whose age counts them as the buffer's does; copies go to the pool.
        left = [s for s in group.samples if not s.done]
        for other in left:
            other.running = False
        self.pool.setdefault(group.seq % self.num_prompts, []).extend(list(s.tokens) for s in left if s.tokens)
        self.ready_seq += 1
        group.ready_seq = self.ready_seq
        self.scheduler.closed(group.group_id, ready=True)
        self.see(ready=self.seen.ready + 1, num_pooled=sum(map(len, self.pool.values())))


def limits(**changes) -> RoundLimits:
    given = {"batch_groups": 4, "group_samples": 2, "ratio": 1.0, "lookahead": 0, "max_lag": 4, "samples_ratio": 2.0}
    return RoundLimits(**given | changes)


def test_a_group_takes_as_many_slots_as_it_starts_samples():
    world = RacingWorld(limits(), slots=9, seed=0, num_prompts=100)
    world.act()
    assert [d for d in world.log if isinstance(d, Admit)] == [Admit(3)]
    assert sum(len(d.sample_ids) for d in world.log if isinstance(d, Start)) == 9


def test_what_a_short_epoch_leaves_goes_on_in_the_next():
    world = RacingWorld(limits(), slots=100, seed=1, num_prompts=8)
    run_rounds(world, 30)
    assert world.continued > 20
    lags = [version - v for version, groups in world.trained for g in groups for s in g.samples for v in s.tokens]
    assert 2 in lags
    assert max(lags) <= 4


def test_what_a_long_epoch_leaves_is_too_old():
    world = RacingWorld(limits(), slots=100, seed=1, num_prompts=40)
    run_rounds(world, 30)
    assert world.continued == 0
    assert world.stale > 20


@pytest.mark.parametrize(
    ("open_versions", "ready_versions", "count", "expected"),
    [
        ([], [], 1, 6),  # the batch trained on 10 takes what is of 6 or younger
        ([], [], 4, 6),
        ([], [], 5, 7),  # five don't fit into one batch of four
        ([6, 6], [6], 1, 6),
        ([6, 6], [6], 2, 7),  # the batch of version 10 is spoken for
        ([7] * 8, [], 1, 8),  # those of 7 fill the batches of 10 and 11
    ],
)
def test_old_tokens_are_admitted_only_if_a_batch_has_room_in_time(open_versions, ready_versions, count, expected):
    ages = Ages()
    for version in open_versions:
        ages.enter_flight(version)
    for version in ready_versions:
        ages.add_ready(version)
    assert ages.oldest_admissible(count, active=10, fill_version=10, max_lag=4, batch_groups=4, offered=0) == expected


def test_what_is_not_ready_finds_no_place_in_a_batch_that_is_offered():
    ages = Ages()
    for version in (9, 9, 9, 9):
        ages.add_ready(version)
    assert ages.oldest_admissible(1, active=10, fill_version=11, max_lag=4, batch_groups=4, offered=1) == 7
    assert ages.oldest_admissible(5, active=10, fill_version=11, max_lag=4, batch_groups=4, offered=1) == 8


@settings(max_examples=200, deadline=None)
@given(
    batch_groups=st.integers(1, 5),
    group_samples=st.integers(1, 3),
    samples_ratio=st.floats(1, 3),
    num_prompts=st.integers(1, 30),
    ratio=st.one_of(st.just(1.0), st.floats(1, 3)),
    lookahead=st.sampled_from([0, 0, 1, 2]),
    extra_lag=st.sampled_from([0, 1, 3, 6]),
    slots=st.integers(1, 40),
    cut=st.sampled_from(Cut),
    admission=st.sampled_from(Admission),
    order=st.sampled_from(RoundOrder),
    seed=st.integers(0, 10_000),
    data=st.data(),
)
def test_rounds_go_on_and_no_trained_token_is_older_than_max_lag(
    batch_groups,
    group_samples,
    samples_ratio,
    num_prompts,
    ratio,
    lookahead,
    extra_lag,
    slots,
    cut,
    admission,
    order,
    seed,
    data,
):
    max_lag = smallest_max_lag(ratio, lookahead) + extra_lag
    given_limits = RoundLimits(
        batch_groups,
        group_samples,
        ratio,
        lookahead,
        max_lag,
        cut=cut,
        admission=admission,
        order=order,
        samples_ratio=samples_ratio,
    )
    world = RacingWorld(given_limits, slots, seed, num_prompts)
    world.see(forecast=world)
    world.act()
    world.live(data.draw, num_trained=10)
    for version, groups in world.trained:
        for group in groups:
            assert sum(s.done for s in group.samples) == group_samples
            assert version - group.oldest <= max_lag
    if admission is Admission.FIXED:
        assert len(world.groups) <= math.ceil(ratio * batch_groups) + batch_groups * (lookahead + 1)
