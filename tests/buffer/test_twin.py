"""Random transitions on the twin and on Redis: after each, both say the same."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from buffer.embedded import EmbeddedRedis
from buffer.interface import CursorMove, Limits, NewGroup, SampleLease
from protocol.errors import AprilError
from protocol.messages import PolicyState
from protocol.samples import Reward
from protocol.states import DropReason, ExpiryReason, FailReason, FinishReason, GroupState, SampleState
from tests.buffer.helpers import Known, Rig, check, memory_rig, piece, plain, prompt, redis_rig

INDEX = st.integers(0, 1 << 16)
STEP = st.integers(0, 4)
EPOCH_BACK = st.sampled_from([0, 0, 0, 0, 1])
SKEW = st.sampled_from([0, 0, 0, 0, 0, 1, -1])
LIMITS = Limits(max_groups=12, max_bytes=4000, sample_bytes=100, max_pool_bytes=1600)  # low enough to be met
NUM_TOKENS = st.integers(0, 3)
LATE_BYTES = 8 * 3 * 100  # last tokens that were handed in since a group became READY
OLDEST = st.sampled_from([0, 0, 1, 2, None])
IDENTITIES = [{}, {}, {"temperature": "1.0"}, {"temperature": "1.0", "model": "m"}, {"model": "other"}]
RARELY = st.sampled_from([False, False, False, True])


class Twins(RuleBasedStateMachine):
    """Every rule calls both buffers; ids that were seen are kept, live or not, so that stale calls happen too."""

    url: str
    reached: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.rigs: list[Rig] = [memory_rig(), redis_rig(self.url)]
        self.owners = [self.run(rig.connect(LIMITS)) for rig in self.rigs]
        self.old: list[Any] = []
        self.everyone = list(self.owners)
        self.sample_ids: list[str] = []
        self.group_ids: list[str] = []
        self.leases: list[SampleLease] = []
        self.lengths: dict[str, int] = {}
        self.version = 0

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    def both(self, name: str, *args: Any, buffers: list[Any] | None = None) -> Any:
        outcomes = [self.outcome(getattr(b, name), args) for b in buffers or self.owners]
        assert plain(outcomes[0]) == plain(outcomes[1]), (name, args)
        return None if isinstance(outcomes[0], type) else outcomes[0]

    def outcome(self, method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        try:
            return self.run(method(*args))
        except AprilError as error:
            return type(error)

    def pick(self, items: list[Any], index: int) -> Any:
        # Mostly something recent, so that samples are carried to their end.
        recent = items[-12:] if index % 8 else items
        return recent[index % len(recent)] if recent else None

    def next_piece(self, sample_id: str, num_tokens: int, skew: int) -> Any:
        return piece(max(self.lengths.get(sample_id, 0) + skew, 0), num_tokens, self.version)

    @invariant()
    def same(self) -> None:
        for name in ("snapshot", "open_samples", "open_groups", "batch_leases", "policies", "changes"):
            self.both(name)
        groups = [i for i in self.group_ids[-6:] if self.both("groups", [i]) is not None]
        self.both("groups", groups)
        self.both("count_longer", 2)
        for buffer in self.owners:
            self.run(check(buffer))
        snapshot = self.run(self.owners[0].snapshot())
        assert snapshot.outstanding >= 0
        assert snapshot.offered * 1 <= snapshot.ledger.ready
        assert snapshot.pool.num_bytes <= LIMITS.max_pool_bytes + LATE_BYTES
        self.no_group_has_more_than_it_wanted()
        self.reached["continued"] = max(self.reached["continued"], snapshot.pool.continued)
        for reason, count in snapshot.pool.expired.items():
            self.reached[reason] = max(self.reached[reason], count)

    def no_group_has_more_than_it_wanted(self) -> None:
        for group in self.owners[0].store.groups.values():
            scored, failed = group.count(SampleState.SCORED), group.count(SampleState.FAILED)
            assert scored <= (group.wanted or len(group.samples))
            if group.state is not GroupState.OPEN:
                assert scored + failed == len(group.samples)

    @rule(sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=3), oldest=OLDEST, twice=RARELY)
    def admit(self, sizes: list[tuple[int, int]], oldest: int | None, twice: bool) -> None:
        before = self.run(self.owners[0].snapshot()).cursor
        after = str(int(before or 0) + len(sizes))
        prompts = [prompt(0 if twice else n) for n in range(len(sizes))]
        new = [NewGroup(p, max(s), min(s), oldest) for p, s in zip(prompts, sizes, strict=True)]
        for group in self.both("admit", new, self.version, CursorMove(before, after)) or ():
            self.group_ids.append(group.group_id)
            self.sample_ids += [s.sample_id for s in group.samples]
            self.lengths.update({s.sample_id: s.num_tokens for s in group.samples})
        self.both("admit", new, self.version, CursorMove("elsewhere", after))

    @rule(count=st.integers(1, 6), lease_s=st.sampled_from([0.0, 3600.0, 3600.0, 3600.0]))
    def start_waiting(self, count: int, lease_s: float) -> None:
        waiting = [s for s in self.run(self.owners[0].open_samples()) if s.state in ("queued", "parked")]
        ids = [s.sample_id for s in waiting[:count]]
        self.leases += self.both("start", ids, f"w{count % 2}", lease_s) or []

    @rule(limit=st.integers(0, 4))
    def park_expired(self, limit: int) -> None:
        # Leases that expire in the same millisecond are ordered by id in both.
        self.both("park_expired", limit)

    @rule(index=INDEX)
    def start_any(self, index: int) -> None:
        if self.sample_ids:
            self.leases += self.both("start", [self.pick(self.sample_ids, index)], "w", 3600.0) or []

    @rule(index=INDEX, count=st.integers(1, 3))
    def renew(self, index: int, count: int) -> None:
        self.both("renew", self.leases[-count:], 3600.0)
        if self.leases:
            self.both("renew", [self.pick(self.leases, index)], 0.0)

    @rule(index=INDEX, num_tokens=NUM_TOKENS, skew=SKEW, again=st.booleans())
    def append(self, index: int, num_tokens: int, skew: int, again: bool) -> None:
        if lease := self.pick(self.leases, index):
            new = self.next_piece(lease.sample_id, num_tokens, skew)
            for _ in range(1 + again):
                self.both("append", lease, new)
            self.note(lease.sample_id)

    @rule(index=INDEX, num_tokens=NUM_TOKENS, skew=SKEW, none=st.booleans())
    def park(self, index: int, num_tokens: int, skew: int, none: bool) -> None:
        if lease := self.pick(self.leases, index):
            self.both("park", lease, None if none else self.next_piece(lease.sample_id, num_tokens, skew))
            self.note(lease.sample_id)

    @rule(index=INDEX, num_tokens=NUM_TOKENS, skew=SKEW, reason=st.sampled_from(FinishReason))
    def finish(self, index: int, num_tokens: int, skew: int, reason: FinishReason) -> None:
        if lease := self.pick(self.leases, index):
            self.both("finish", lease, self.next_piece(lease.sample_id, num_tokens, skew), reason)
            self.note(lease.sample_id)

    @rule()
    def finish_and_score_everything(self) -> None:
        for brief in self.run(self.owners[0].open_samples()):
            if brief.state in (SampleState.QUEUED, SampleState.PARKED):
                started = self.both("start", [brief.sample_id], "w", 3600.0)
                if not started:  # its group was READY without it
                    continue
                (lease,) = started
                self.both("finish", lease, piece(brief.num_tokens, 1, self.version), FinishReason.STOP)
                self.both("score", brief.sample_id, Reward(1.0), 1)

    @rule(skip=st.integers(0, 2))
    def race(self, skip: int) -> None:
        """Everything runs and has tokens, some of it is scored: groups that want fewer samples part with the others."""
        waiting = [b for b in self.run(self.owners[0].open_samples()) if b.state in ("queued", "parked")]
        leases = self.both("start", [b.sample_id for b in waiting], "w", 3600.0) or []
        for lease, brief in zip(leases, waiting, strict=True):
            self.both("append", lease, piece(brief.num_tokens, 1 + len(self.leases) % 3, self.version))
            self.leases.append(lease)
            self.note(lease.sample_id)
        for lease in leases[skip:]:
            self.both("finish", lease, None, FinishReason.STOP)
            self.both("score", lease.sample_id, Reward(1.0), 1)

    @rule(index=INDEX, most=st.integers(1, 2))
    def record_failure(self, index: int, most: int) -> None:
        if lease := self.pick(self.leases, index):
            self.both("record_failure", lease, f"error {index}", most)

    @rule(value=st.sampled_from([0.0, 1.0]), min_scored=st.integers(0, 3))
    def score_finished(self, value: float, min_scored: int) -> None:
        for brief in self.run(self.owners[0].open_samples()):
            if brief.state is SampleState.FINISHED:
                self.both("score", brief.sample_id, Reward(value, {"x": value}), min_scored)

    @rule(index=INDEX, value=st.sampled_from([0.0, 1.0]))
    def score_any(self, index: int, value: float) -> None:
        if self.sample_ids:
            self.both("score", self.pick(self.sample_ids, index), Reward(value, {"x": value}), 1)

    @rule(index=INDEX, reason=st.sampled_from(FailReason), min_scored=st.integers(1, 2))
    def fail(self, index: int, reason: FailReason, min_scored: int) -> None:
        if self.sample_ids:
            self.both("fail", self.pick(self.sample_ids, index), reason, "why", min_scored)

    @rule(before=st.integers(-1, 3))
    def expire_pooled(self, before: int) -> None:
        self.both("expire_pooled", before)

    @rule(index=INDEX, reason=st.sampled_from(DropReason))
    def drop(self, index: int, reason: DropReason) -> None:
        if self.group_ids and index % 3 == 0:
            self.both("drop", self.pick(self.group_ids, index), reason)

    @rule(size=st.integers(1, 2))
    def offer(self, size: int) -> None:
        self.both("offer", size)

    @rule(size=st.integers(1, 3))
    def resize_offers(self, size: int) -> None:
        self.both("resize_offers", size)

    @rule(skew=SKEW, back=EPOCH_BACK, size=st.integers(1, 2))
    def lease_next(self, skew: int, back: int, size: int) -> None:
        snapshot = self.run(self.owners[0].snapshot())
        step = snapshot.durable_step + len(snapshot.leased_steps) + 1 + skew
        self.both("lease_batch", step, snapshot.trainer_epoch - back, size)

    @rule(ahead=STEP, digest=st.sampled_from(["aa", "bb"]))
    def record_spool(self, ahead: int, digest: str) -> None:
        self.both("record_spool", self.run(self.owners[0].snapshot()).durable_step + ahead, digest)

    @rule(ahead=STEP, back=EPOCH_BACK)
    def mark_trained(self, ahead: int, back: int) -> None:
        snapshot = self.run(self.owners[0].snapshot())
        self.both("mark_trained", snapshot.durable_step + ahead, snapshot.trainer_epoch - back)

    @rule(ahead=STEP, back=EPOCH_BACK)
    def ack(self, ahead: int, back: int) -> None:
        snapshot = self.run(self.owners[0].snapshot())
        self.both("ack", snapshot.durable_step + ahead, snapshot.trainer_epoch - back)

    @rule(ahead=st.integers(-1, 2))
    def open_trainer(self, ahead: int) -> None:
        self.both("open_trainer", self.run(self.owners[0].snapshot()).durable_step + ahead)

    @rule(ahead=STEP, back=EPOCH_BACK)
    def publish_policy(self, ahead: int, back: int) -> None:
        snapshot = self.run(self.owners[0].snapshot())
        step, epoch = snapshot.durable_step + ahead, snapshot.trainer_epoch - back
        if policy := self.both("publish_policy", step, f"w/{step}", epoch):
            self.version = policy.version

    @rule(version=STEP, state=st.sampled_from(PolicyState))
    def set_policy_state(self, version: int, state: PolicyState) -> None:
        self.both("set_policy_state", version, state, "why" if state is PolicyState.FAILED else None, 0.25)

    @rule(chance=st.integers(0, 3), identity=st.sampled_from(IDENTITIES), known=st.tuples(STEP, STEP))
    def claim(self, chance: int, identity: dict[str, str], known: tuple[int, int]) -> None:
        if chance == 0:
            owners = [self.run(rig.connect(LIMITS)) for rig in self.rigs]
            self.everyone += owners
            if self.both("claim_service", "next", identity, Known(*known), buffers=owners) is not None:
                self.old, self.owners = self.owners, owners

    @rule(index=INDEX)
    def call_of_a_superseded_service(self, index: int) -> None:
        if self.old and self.leases:
            lease = self.pick(self.leases, index)
            assert self.both("append", lease, self.next_piece(lease.sample_id, 1, 0), buffers=self.old) is None
            assert self.both("offer", 1, buffers=self.old) is None

    def note(self, sample_id: str) -> None:
        found = self.outcome(self.owners[0].samples, ([sample_id],))
        self.lengths[sample_id] = 0 if isinstance(found, type) else found[0].num_tokens

    def teardown(self) -> None:
        for buffer in self.everyone:
            self.run(buffer.close())
        self.runner.close()


def explore(url: str, num_examples: int, num_steps: int) -> Counter[str]:
    """How often in one example, at the most, samples were continued, and expired for each reason."""
    reached: Counter[str] = Counter()
    machine = type("TwinsHere", (Twins,), {"url": url, "reached": reached})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )
    return reached


def test_twin_and_redis_agree(redis_server: EmbeddedRedis) -> None:
    explore(redis_server.url, num_examples=12, num_steps=40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twin_and_redis_agree_at_length(redis_server: EmbeddedRedis) -> None:
    reached = explore(redis_server.url, num_examples=500, num_steps=50)
    assert all(reached[name] for name in ("continued", *ExpiryReason)), reached
