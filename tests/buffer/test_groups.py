"""Contract: failures, scores and drops, and what they make of the group."""

from typing import Any

import pytest

from protocol.errors import (
    DataError,
    FencedError,
    NotFoundError,
    TransitionError,
)
from protocol.samples import Reward
from protocol.states import DropReason, FailReason, FinishReason, GroupState, SampleState
from tests.buffer.helpers import LONG_S, Rig, admit, finish_group, piece, start_one


async def test_the_last_sample_makes_the_group_ready(buffer: Any) -> None:
    (group,) = await admit(buffer, num_samples=3)
    a, b, c = (s.sample_id for s in group.samples)
    for sample_id in (a, b, c):
        await buffer.finish(await start_one(buffer, sample_id), piece(0, 2), FinishReason.STOP)
    assert await buffer.score(a, Reward(1.0, {"x": 0.25}), 2) is GroupState.OPEN
    assert await buffer.fail(b, FailReason.REWARD_TIMEOUT, "took 5 s", 2) is GroupState.OPEN
    assert await buffer.score(c, Reward(0.0), 2) is GroupState.READY
    (stored,) = await buffer.groups([group.group_id])
    assert stored.state is GroupState.READY
    assert stored.samples[0].reward == Reward(1.0, {"x": 0.25})
    assert (stored.samples[1].fail_reason, stored.samples[1].error) == (FailReason.REWARD_TIMEOUT, "took 5 s")
    snapshot = await buffer.snapshot()
    assert (snapshot.counters["samples_scored"], snapshot.counters["samples_failed"]) == (2, 1)
    assert snapshot.counters["failed:reward_timeout"] == 1
    assert "samples_multi_version" not in snapshot.counters


async def test_a_group_that_cannot_reach_its_minimum_is_dropped_at_once(buffer: Any) -> None:
    (group,) = await admit(buffer, num_samples=3)
    a, b, c = (s.sample_id for s in group.samples)
    await buffer.finish(await start_one(buffer, a), piece(0, 2), FinishReason.STOP)
    running = await start_one(buffer, b)
    await buffer.append(running, piece(0, 2))
    await buffer.park(await start_one(buffer, c), piece(0, 3))
    assert await buffer.fail(a, FailReason.REWARD_ERROR, "broken", 3) is GroupState.DROPPED
    (stored,) = await buffer.groups([group.group_id])
    assert (stored.state, stored.drop_reason, stored.samples) == (GroupState.DROPPED, "too_few_samples", ())
    assert stored.prompt.prompt_id == group.prompt.prompt_id
    with pytest.raises(FencedError):
        await buffer.append(running, piece(2, 1))
    with pytest.raises(NotFoundError):
        await buffer.score(c, Reward(1.0), 3)
    snapshot = await buffer.snapshot()
    assert snapshot.dropped[DropReason.TOO_FEW_SAMPLES] == snapshot.ledger.dropped == 1
    assert sum(snapshot.samples.values()) == 0


async def test_failing_a_running_sample_takes_its_lease(buffer: Any) -> None:
    (group,) = await admit(buffer)
    lease = await start_one(buffer, group.samples[0].sample_id)
    assert await buffer.fail(lease.sample_id, FailReason.LEASE_EXPIRED, "gone", 1) is GroupState.OPEN
    with pytest.raises(FencedError):
        await buffer.append(lease, piece(0, 1))
    assert await buffer.fail(lease.sample_id, FailReason.LEASE_EXPIRED, "gone", 1) is GroupState.OPEN
    with pytest.raises(TransitionError):
        await buffer.fail(lease.sample_id, FailReason.ENGINE_ERROR, "gone", 1)
    with pytest.raises(TransitionError):
        await buffer.fail(group.samples[1].sample_id, FailReason.ENGINE_ERROR, "is queued", 1)


async def test_engine_failures_are_counted_once_an_attempt_and_end_the_sample(buffer: Any, rig: Rig) -> None:
    (group,) = await admit(buffer)
    sample_id, other = (s.sample_id for s in group.samples)
    lease = await start_one(buffer, sample_id)
    await buffer.append(lease, piece(0, 4))
    assert await buffer.record_failure(lease, "first", 2) is None
    before = rig.fingerprint()
    assert await buffer.record_failure(lease, "first", 2) is None
    assert rig.fingerprint() == before
    (sample,) = await buffer.samples([sample_id])
    assert (sample.state, sample.num_failures, sample.num_tokens) == (SampleState.PARKED, 1, 4)
    lease = await start_one(buffer, sample_id)
    assert await buffer.record_failure(lease, "second", 2) is GroupState.OPEN
    assert await buffer.record_failure(lease, "second", 2) is GroupState.OPEN
    (sample,) = await buffer.samples([sample_id])
    assert (sample.state, sample.fail_reason, sample.error) == (SampleState.FAILED, FailReason.ENGINE_ERROR, "second")
    await buffer.finish(await start_one(buffer, other), piece(0, 1), FinishReason.STOP)
    assert await buffer.score(other, Reward(1.0), 1) is GroupState.READY


async def test_a_group_whose_samples_all_fail_is_dropped(buffer: Any) -> None:
    (group,) = await admit(buffer)
    states = [await buffer.record_failure(await start_one(buffer, s.sample_id), "dead", 1) for s in group.samples]
    assert states == [GroupState.OPEN, GroupState.DROPPED]


async def test_a_last_engine_failure_heeds_the_minimum_that_scores_were_given(buffer: Any) -> None:
    (group,) = await admit(buffer, num_samples=3)
    a, b, c = (s.sample_id for s in group.samples)
    for sample_id in (a, b):
        await buffer.finish(await start_one(buffer, sample_id), piece(0, 1), FinishReason.STOP)
        await buffer.score(sample_id, Reward(1.0), 3)
    assert await buffer.record_failure(await start_one(buffer, c), "dead", 1) is GroupState.DROPPED


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_reward_that_is_not_finite_never_enters(buffer: Any, value: float) -> None:
    (group,) = await admit(buffer)
    await buffer.finish(await start_one(buffer, group.samples[0].sample_id), piece(0, 1), FinishReason.STOP)
    with pytest.raises(DataError):
        await buffer.score(group.samples[0].sample_id, Reward(value), 1)


async def test_an_empty_response_can_be_scored(buffer: Any) -> None:
    (group,) = await admit(buffer)
    state = GroupState.OPEN
    for sample in group.samples:
        await buffer.finish(await start_one(buffer, sample.sample_id), None, FinishReason.STOP)
        state = await buffer.score(sample.sample_id, Reward(0.0), 1)
    assert state is GroupState.READY
    assert (await buffer.open_groups())[0].oldest_version is None


async def test_drop_forgets_the_samples_and_keeps_the_reason(buffer: Any, rig: Rig) -> None:
    first, second = await admit(buffer, 2)
    lease = await start_one(buffer, first.samples[0].sample_id)
    await buffer.append(lease, piece(0, 9))
    await finish_group(buffer, second)
    await buffer.drop(first.group_id, DropReason.FILTERED)
    await buffer.drop(second.group_id, DropReason.STALE)
    before = rig.fingerprint()
    await buffer.drop(first.group_id, DropReason.FILTERED)
    with pytest.raises(TransitionError):
        await buffer.drop(first.group_id, DropReason.OPERATOR)
    with pytest.raises(NotFoundError):
        await buffer.drop("g000000009", DropReason.OPERATOR)
    assert rig.fingerprint() == before
    assert [g.drop_reason for g in await buffer.groups([first.group_id, second.group_id])] == ["filtered", "stale"]
    with pytest.raises(NotFoundError):
        await buffer.samples([lease.sample_id])
    assert await buffer.renew([lease], LONG_S) == [lease]
    assert await buffer.open_samples() == []
    assert await buffer.open_groups() == []
    assert sum((await buffer.snapshot()).samples.values()) == 0


async def test_tombstones_are_bounded(rig: Rig) -> None:
    service = (await rig.service()).inner
    groups = await admit(service, 1010, num_samples=1)
    for group in groups:
        await service.drop(group.group_id, DropReason.OPERATOR)
    with pytest.raises(NotFoundError):
        await service.groups([groups[9].group_id])
    assert (await service.groups([groups[10].group_id]))[0].drop_reason == "operator"
    assert (await service.recount()).faults == ()
    await service.close()


async def test_multi_version_samples_are_counted_when_scored(buffer: Any) -> None:
    (group,) = await admit(buffer)
    lease = await start_one(buffer, group.samples[0].sample_id)
    await buffer.park(lease, piece(0, 2, 1))
    lease = await start_one(buffer, lease.sample_id)
    await buffer.finish(lease, piece(2, 2, 2), FinishReason.STOP)
    await buffer.score(lease.sample_id, Reward(1.0), 1)
    counters = (await buffer.snapshot()).counters
    assert (counters["samples_multi_version"], counters["samples_resumed"], counters["resumes"]) == (1, 1, 1)


async def test_unknown_ids_are_not_found(buffer: Any) -> None:
    for call in (
        lambda: buffer.samples(["g000000000.000"]),
        lambda: buffer.samples(["x"]),
        lambda: buffer.groups(["g000000000"]),
        lambda: buffer.score("g000000000.000", Reward(1.0), 1),
        lambda: buffer.fail("g000000000.001", FailReason.ENGINE_ERROR, "", 1),
    ):
        with pytest.raises(NotFoundError):
            await call()
