"""Contract: offers, leases of batches, spooling, trained and durable, trainer sessions."""

from typing import Any

import pytest

from protocol.errors import ConflictError, FencedError, NotFoundError, RequestError, TransitionError
from protocol.messages import PolicyState
from protocol.samples import Reward
from protocol.states import DropReason, FinishReason, GroupState, SampleState
from tests.buffer.helpers import Rig, admit, finish_group, leased_run, piece, plain, start_one


async def test_offers_speak_for_ready_groups_once(buffer: Any) -> None:
    groups = await admit(buffer, 5)
    for group in groups:
        await finish_group(buffer, group)
    assert [await buffer.offer(2) for _ in range(3)] == [True, True, False]
    snapshot = await buffer.snapshot()
    assert (snapshot.offered, snapshot.outstanding) == (2, 2)
    with pytest.raises(RequestError):
        await buffer.offer(0)


async def test_nothing_is_leased_without_an_offer(buffer: Any) -> None:
    epoch = (await buffer.open_trainer(0)).trainer_epoch
    (group,) = await admit(buffer)
    await finish_group(buffer, group)
    assert await buffer.lease_batch(1, epoch, 1) is None
    await buffer.offer(1)
    lease = await buffer.lease_batch(1, epoch, 1)
    assert lease.group_ids == (group.group_id,)
    assert (await buffer.groups([group.group_id]))[0].step == 1


async def test_batches_take_the_oldest_tokens_first_then_the_earliest_ready(buffer: Any) -> None:
    epoch = (await buffer.open_trainer(0)).trainer_epoch
    a, b, c, d = await admit(buffer, 4)
    for group, version in ((d, 3), (b, 1), (c, 3), (a, 3)):
        await finish_group(buffer, group, version)
    for step, expected in ((1, [b, d]), (2, [c, a])):
        assert await buffer.offer(2)
        lease = await buffer.lease_batch(step, epoch, 2)
        assert list(lease.group_ids) == [g.group_id for g in expected]


async def test_the_same_step_gives_the_same_groups_for_ever(buffer: Any, rig: Rig) -> None:
    epoch, _ = await leased_run(buffer, 2)
    first = await buffer.lease_batch(1, epoch, 1)
    more = await admit(buffer, 2)
    for group in more:
        await finish_group(buffer, group)
    await buffer.offer(1)
    before = rig.fingerprint()
    assert await buffer.lease_batch(1, epoch, 1) == first
    assert await buffer.lease_batch(1, epoch, 5) == first
    assert rig.fingerprint() == before
    reopened = await buffer.open_trainer(0)
    assert await buffer.lease_batch(1, reopened.trainer_epoch, 1) == first
    assert plain(await buffer.groups(first.group_ids)) == plain(await buffer.groups(first.group_ids))


async def test_steps_are_leased_one_after_the_other(buffer: Any) -> None:
    epoch, _ = await leased_run(buffer, 2)
    for step in (4, 9):
        with pytest.raises(ConflictError, match="3"):
            await buffer.lease_batch(step, epoch, 1)
    await buffer.ack(1, epoch)
    with pytest.raises(ConflictError, match="durable"):
        await buffer.lease_batch(1, epoch, 1)
    assert await buffer.lease_batch(3, epoch, 1) is None


async def test_spooling_deletes_tokens_and_nothing_else(buffer: Any, rig: Rig) -> None:
    epoch, groups = await leased_run(buffer, 2)
    await buffer.record_spool(1, "abc")
    before = rig.fingerprint()
    await buffer.record_spool(1, "abc")
    with pytest.raises(ConflictError):
        await buffer.record_spool(1, "abd")
    with pytest.raises(NotFoundError):
        await buffer.record_spool(3, "abc")
    assert rig.fingerprint() == before
    assert (await buffer.lease_batch(1, epoch, 1)).sha256 == "abc"
    first, second = await buffer.groups([g.group_id for g in groups])
    assert [s.num_tokens for s in first.samples] == [0, 0]
    assert first.samples[0].reward == Reward(1.0, {"right": 1.0})
    assert [s.num_tokens for s in second.samples] == [4, 4]


async def test_trained_frees_capacity_and_ack_consumes(buffer: Any, rig: Rig) -> None:
    epoch, groups = await leased_run(buffer, 3)
    assert (await buffer.snapshot()).outstanding == 3
    assert await buffer.mark_trained(2, epoch) == 2
    assert await buffer.mark_trained(1, epoch) == 2
    assert [lease.trained for lease in await buffer.batch_leases()] == [True, True, False]
    snapshot = await buffer.snapshot()
    assert (snapshot.outstanding, snapshot.trained_step, snapshot.durable_step) == (1, 2, 0)
    assert snapshot.leased_steps == (1, 2, 3)
    await buffer.record_spool(1, "abc")
    released = await buffer.ack(2, epoch)
    assert [(lease.step, lease.group_ids, lease.sha256) for lease in released] == [
        (1, (groups[0].group_id,), "abc"),
        (2, (groups[1].group_id,), None),
    ]
    before = rig.fingerprint()
    assert await buffer.ack(2, epoch) == []
    assert await buffer.ack(1, epoch) == []
    assert rig.fingerprint() == before
    snapshot = await buffer.snapshot()
    assert (snapshot.ledger.consumed, snapshot.ledger.leased, snapshot.durable_step) == (2, 1, 2)
    assert snapshot.samples[SampleState.SCORED] == 2
    with pytest.raises(NotFoundError):
        await buffer.groups([groups[0].group_id])
    await buffer.ack(3, epoch)
    assert (await buffer.snapshot()).trained_step == 3


async def test_what_was_never_leased_is_neither_trained_nor_durable(buffer: Any, rig: Rig) -> None:
    epoch, _ = await leased_run(buffer, 1)
    before = rig.fingerprint()
    with pytest.raises(ConflictError):
        await buffer.mark_trained(2, epoch)
    with pytest.raises(ConflictError):
        await buffer.ack(2, epoch)
    assert rig.fingerprint() == before


async def test_a_superseded_trainer_changes_nothing(buffer: Any, rig: Rig) -> None:
    old, _ = await leased_run(buffer, 2)
    new = (await buffer.open_trainer(0)).trainer_epoch
    assert new == old + 1
    before = rig.fingerprint()
    for epoch in (old, new + 1):
        for call in (
            lambda e=epoch: buffer.lease_batch(1, e, 1),
            lambda e=epoch: buffer.mark_trained(1, e),
            lambda e=epoch: buffer.ack(1, e),
            lambda e=epoch: buffer.publish_policy(1, "weights", e),
        ):
            with pytest.raises(FencedError):
                await call()
    assert rig.fingerprint() == before
    assert (await buffer.snapshot()).counters["fenced_writes"] == 8


async def test_a_rolled_back_trainer_replays_what_its_checkpoint_lacks(buffer: Any) -> None:
    epoch, groups = await leased_run(buffer, 4)
    await buffer.mark_trained(4, epoch)
    await buffer.ack(1, epoch)
    opened = await buffer.open_trainer(2)
    assert (opened.durable_step, [lease.step for lease in opened.released]) == (2, [2])
    snapshot = await buffer.snapshot()
    assert (snapshot.trained_step, snapshot.durable_step, snapshot.outstanding) == (2, 2, 2)
    assert [lease.trained for lease in await buffer.batch_leases()] == [False, False]
    lease = await buffer.lease_batch(3, opened.trainer_epoch, 1)
    assert lease.group_ids == (groups[2].group_id,)
    with pytest.raises(ConflictError, match="step 2"):
        await buffer.open_trainer(1)
    assert (await buffer.snapshot()).trainer_epoch == opened.trainer_epoch


async def test_a_checkpoint_that_is_ahead_of_a_lost_buffer_goes_on(buffer: Any) -> None:
    opened = await buffer.open_trainer(50)
    (group,) = await admit(buffer)
    await finish_group(buffer, group)
    await buffer.offer(1)
    lease = await buffer.lease_batch(51, opened.trainer_epoch, 1)
    assert lease.group_ids == (group.group_id,)
    assert (await buffer.snapshot()).outstanding == 1


async def test_a_dropped_ready_group_takes_its_offer_back(buffer: Any) -> None:
    epoch = (await buffer.open_trainer(0)).trainer_epoch
    groups = await admit(buffer, 3)
    for group in groups:
        await finish_group(buffer, group)
    assert await buffer.offer(2)
    await buffer.drop(groups[0].group_id, DropReason.STALE)
    assert (await buffer.snapshot()).offered == 1
    await buffer.drop(groups[1].group_id, DropReason.STALE)
    assert (await buffer.snapshot()).offered == 0
    assert await buffer.lease_batch(1, epoch, 2) is None


async def test_a_leased_group_is_not_dropped(buffer: Any) -> None:
    _, groups = await leased_run(buffer, 1)
    with pytest.raises(TransitionError):
        await buffer.drop(groups[0].group_id, DropReason.OPERATOR)


async def test_surplus_stays_for_the_next_batch(buffer: Any) -> None:
    epoch = (await buffer.open_trainer(0)).trainer_epoch
    for group in await admit(buffer, 3):
        await finish_group(buffer, group)
    await buffer.offer(2)
    await buffer.lease_batch(1, epoch, 2)
    ledger = (await buffer.snapshot()).ledger
    assert (ledger.ready, ledger.leased, ledger.open) == (1, 2, 0)
    assert [g.state for g in await buffer.open_groups()] == [GroupState.READY]
    assert (await buffer.snapshot()).counters["surplus_groups_kept"] == 1


async def test_a_lease_names_the_version_that_the_trainer_holds(buffer: Any) -> None:
    epoch = (await buffer.open_trainer(0)).trainer_epoch
    for group in await admit(buffer, 5):
        await finish_group(buffer, group)

    async def lease(step: int) -> int:
        await buffer.offer(1)
        return (await buffer.lease_batch(step, epoch, 1)).policy_version

    assert [await lease(1), await lease(2)] == [0, 1]
    await buffer.publish_policy(1, "a", epoch)
    assert await lease(3) == 2
    await buffer.publish_policy(2, "b", epoch)
    await buffer.publish_policy(3, "c", epoch)
    assert await lease(4) == 3
    epoch = (await buffer.open_trainer(2)).trainer_epoch
    restored = await buffer.publish_policy(2, "b again", epoch)
    assert restored.version == 4
    assert await lease(5) == 6
    assert (await buffer.lease_batch(3, epoch, 1)).policy_version == 2


async def test_policies_are_numbered_and_one_is_active(buffer: Any) -> None:
    epoch = (await buffer.open_trainer(0)).trainer_epoch
    (zero,) = await buffer.policies()
    assert (zero.version, zero.step, zero.state, zero.path) == (0, 0, PolicyState.ACTIVE, "")
    first = await buffer.publish_policy(1, "/weights/1", epoch)
    assert (first.version, first.step, first.trainer_epoch, first.state) == (1, 1, epoch, PolicyState.QUEUED)
    assert await buffer.publish_policy(1, "/weights/other", epoch) == first
    second = await buffer.publish_policy(2, "/weights/2", epoch)
    await buffer.set_policy_state(1, PolicyState.INSTALLING, None, None)
    failed = await buffer.set_policy_state(1, PolicyState.FAILED, "replica 0: checksum", None)
    assert (failed.state, failed.error, failed.path) == (PolicyState.FAILED, "replica 0: checksum", "/weights/1")
    assert (await buffer.snapshot()).active_version == 0
    active = await buffer.set_policy_state(second.version, PolicyState.ACTIVE, None, 0.1234567890123456)
    assert active.install_s == 0.1234567890123456
    assert [p.state for p in await buffer.policies()] == [
        PolicyState.SUPERSEDED,
        PolicyState.FAILED,
        PolicyState.ACTIVE,
    ]
    snapshot = await buffer.snapshot()
    assert (snapshot.active_version, snapshot.newest_version) == (2, 2)
    with pytest.raises(NotFoundError):
        await buffer.set_policy_state(3, PolicyState.ACTIVE, None, None)
    with pytest.raises(NotFoundError):
        await buffer.set_policy_state(-1, PolicyState.ACTIVE, None, None)


async def test_a_failed_version_is_queued_when_it_is_published_again(buffer: Any) -> None:
    epoch = (await buffer.open_trainer(0)).trainer_epoch
    await buffer.publish_policy(1, "/weights/1", epoch)
    await buffer.set_policy_state(1, PolicyState.FAILED, "replica 0: checksum", 0.5)
    again = await buffer.publish_policy(1, "/weights/again", epoch)
    assert (again.version, again.state, again.path, again.error, again.install_s) == (
        1,
        PolicyState.QUEUED,
        "/weights/again",
        None,
        None,
    )
    assert (await buffer.snapshot()).newest_version == 1


async def test_old_policies_are_forgotten_but_the_active_one(rig: Rig) -> None:
    service = (await rig.service()).inner
    epoch = (await service.open_trainer(0)).trainer_epoch
    for step in range(1, 521):
        await service.publish_policy(step, f"w/{step}", epoch)
    versions = [p.version for p in await service.policies()]
    assert versions == [0, *range(9, 521)]
    assert (await service.publish_policy(520, "w", epoch)).version == 520
    await service.close()


async def test_must_finish_groups_sort_by_their_oldest_token(buffer: Any) -> None:
    (group,) = await admit(buffer)
    a, b = (s.sample_id for s in group.samples)
    await buffer.park(await start_one(buffer, a), piece(0, 2, 4))
    await buffer.finish(await start_one(buffer, b), piece(0, 2, 2), FinishReason.STOP)
    await buffer.score(b, Reward(1.0), 1)
    (brief,) = await buffer.open_groups()
    assert (brief.oldest_version, brief.num_scored, brief.num_failed) == (2, 1, 0)
