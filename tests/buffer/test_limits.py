"""Contract: leases that run out, and caps on what is admitted."""

from typing import Any

import pytest

from buffer.interface import CursorMove, Limits, NewGroup
from protocol.errors import FencedError, UnavailableError
from protocol.samples import Reward
from protocol.states import DropReason, FinishReason, SampleState
from tests.buffer.helpers import LONG_S, Rig, admit, check, finish_group, piece, prompt, start_one


async def test_expired_leases_are_parked_with_what_was_checkpointed(buffer: Any, rig: Rig) -> None:
    (group,) = await admit(buffer, num_samples=3)
    a, b, c = (s.sample_id for s in group.samples)
    (first,) = await buffer.start([a], "w", 0.0)
    await buffer.append(first, piece(0, 3, 4))
    await buffer.start([b], "w", 0.0)
    await buffer.start([c], "w", LONG_S)
    assert sorted(await buffer.park_expired(10)) == [a, b]
    assert [(s.sample_id, s.state, s.num_tokens, s.num_expiries) for s in await buffer.open_samples()] == [
        (a, SampleState.PARKED, 3, 1),
        (b, SampleState.QUEUED, 0, 1),
        (c, SampleState.RUNNING, 0, 0),
    ]
    assert (await buffer.snapshot()).counters["leases_expired"] == 2
    before = rig.fingerprint()
    assert await buffer.park_expired(10) == []
    with pytest.raises(FencedError):
        await buffer.append(first, piece(3, 1, 4))
    assert await buffer.renew([first], LONG_S) == [first]
    assert rig.fingerprint() == before
    lease = await start_one(buffer, a, "other")
    await buffer.append(lease, piece(3, 1, 5))
    (sample,) = await buffer.samples([a])
    assert (sample.num_tokens, sample.num_resumes, lease.attempt) == (4, 1, first.attempt + 1)


async def test_only_expired_leases_are_taken(buffer: Any, rig: Rig) -> None:
    (group,) = await admit(buffer, num_samples=4)
    ids = [s.sample_id for s in group.samples]
    leases = await buffer.start(ids, "w", 0.0)
    assert await buffer.renew(leases[:2], LONG_S) == []
    before = rig.fingerprint()
    assert await buffer.park_expired(0) == []
    assert rig.fingerprint() == before
    assert len(await buffer.park_expired(1)) == 1
    assert len(await buffer.park_expired(9)) == 1
    states = {s.sample_id: s.state for s in await buffer.open_samples()}
    assert [states[i] for i in ids[:2]] == [SampleState.RUNNING] * 2
    assert [states[i] for i in ids[2:]] == [SampleState.QUEUED] * 2


async def test_a_takeover_counts_the_expiry_once(buffer: Any) -> None:
    (group,) = await admit(buffer, num_samples=1)
    sample_id = group.samples[0].sample_id
    await buffer.start([sample_id], "a", 0.0)
    await buffer.start([sample_id], "b", LONG_S)
    assert await buffer.park_expired(9) == []
    (brief,) = await buffer.open_samples()
    assert (brief.num_expiries, (await buffer.snapshot()).counters["leases_expired"]) == (1, 1)


async def test_groups_are_admitted_up_to_the_cap(rig: Rig) -> None:
    service = await rig.service(Limits(max_groups=3))
    await service.claim_service("first")
    groups = await admit(service, 2)
    before = rig.fingerprint()
    with pytest.raises(UnavailableError, match=r"buffer\.max_groups = 3"):
        await service.admit([NewGroup(prompt(n), 2) for n in range(2)], 0, CursorMove("2", "4"))
    assert rig.fingerprint() == before
    snapshot = await service.snapshot()
    assert (snapshot.held_groups, Limits(max_groups=3).room(snapshot, 2)) == (2, 1)
    await admit(service, 1)
    await service.admit([], 0, CursorMove("3", "4"))  # the cursor alone needs no room
    await service.drop(groups[0].group_id, DropReason.OPERATOR)
    await admit(service, 1)
    await service.close()


async def test_capacity_is_freed_when_trained_and_held_again_after_a_rollback(rig: Rig) -> None:
    service = await rig.service(Limits(max_groups=2))
    await service.claim_service("first")
    epoch = (await service.open_trainer(0)).trainer_epoch
    for group in await admit(service, 2):
        await finish_group(service, group)
    for step in (1, 2):
        await service.offer(1)
        await service.lease_batch(step, epoch, 1)
    with pytest.raises(UnavailableError):
        await admit(service, 1)
    await service.mark_trained(1, epoch)
    await service.mark_trained(1, epoch)
    assert (await service.snapshot()).held_groups == 1
    await admit(service, 1)
    assert (await service.snapshot()).held_groups == 2
    epoch = (await service.open_trainer(0)).trainer_epoch  # rolled back: step 1 will be replayed
    assert (await service.snapshot()).held_groups == 3
    await service.mark_trained(2, epoch)
    assert (await service.snapshot()).held_groups == 1
    await service.ack(2, epoch)
    assert (await service.snapshot()).held_groups == 1
    await service.close()


async def test_bytes_are_reserved_for_the_longest_responses(rig: Rig) -> None:
    limits = Limits(max_bytes=10_000, sample_bytes=800)
    service = await rig.service(limits)
    await service.claim_service("first")
    groups = await admit(service, 4, num_samples=3)
    snapshot = await service.snapshot()
    assert (snapshot.held_bytes, limits.room(snapshot, 3), limits.room(snapshot, 1)) == (9600, 0, 0)
    with pytest.raises(UnavailableError, match=r"buffer\.max_bytes = 10000"):
        await admit(service, 1, num_samples=1)
    for sample in groups[0].samples:  # an admitted sample grows to its end
        lease = await start_one(service, sample.sample_id)
        await service.finish(lease, piece(0, 100), FinishReason.LENGTH)
        await service.score(sample.sample_id, Reward(1.0), 1)
    assert (await service.snapshot()).held_bytes == 9600
    await service.drop(groups[1].group_id, DropReason.STALE)
    assert (await service.snapshot()).held_bytes == 7200
    await admit(service, 1, num_samples=3)
    await check(service.inner)
    await service.close()


async def test_an_admission_that_is_refused_is_refused_at_once(rig: Rig) -> None:
    service = await rig.service(Limits(max_groups=1))
    if rig.kind == "redis":
        service.inner._store.patience_s = LONG_S
    with pytest.raises(UnavailableError):
        await admit(service, 2)
    assert service.inner.waiting_since is None
    await service.close()
