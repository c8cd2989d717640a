"""Contract: samples that their groups are READY without, and how they go on."""

from typing import Any

import pytest

from buffer.interface import CursorMove, Limits, NewGroup, SampleLease
from buffer.pool import POOLED_BYTES
from protocol.errors import ConflictError, FencedError, NotFoundError, RequestError, TransitionError
from protocol.messages import PoolLedger
from protocol.samples import Group, Reward
from protocol.states import DropReason, ExpiryReason, FailReason, FinishReason, GroupState, SampleState
from tests.buffer.helpers import LONG_S, Rig, admit, check, finish_group, piece, plain, prompt, start_one


async def race(
    buffer: Any, num_samples: int, wanted: int, oldest_version: int | None = 0, n: int = 0, version: int = 0
) -> Group:
    """Admit one group that wants fewer samples than it starts."""
    before = (await buffer.snapshot()).cursor
    after = str(int(before or 0) + 1)
    new = NewGroup(prompt(n), num_samples, wanted, oldest_version)
    (group,) = await buffer.admit([new], version, CursorMove(before, after))
    return group


async def run_all(buffer: Any, group: Group, num_tokens: int = 3, version: int = 0) -> list[SampleLease]:
    """All samples run, each with one token more than the one before."""
    leases = await buffer.start([s.sample_id for s in group.samples], "w", LONG_S)
    for extra, (lease, sample) in enumerate(zip(leases, group.samples, strict=True)):
        await buffer.append(lease, piece(sample.num_tokens, num_tokens + extra, version))
    return leases


async def win(buffer: Any, *leases: SampleLease) -> GroupState:
    state = GroupState.OPEN
    for lease in leases:
        await buffer.finish(lease, None, FinishReason.STOP)
        state = await buffer.score(lease.sample_id, Reward(1.0), 1)
    return state


async def pooled_run(buffer: Any, num_left: int = 2, version: int = 0) -> tuple[Group, list[SampleLease]]:
    """A group that is READY with two samples; `num_left` more are pooled with 5, 6, ... tokens of `version`."""
    group = await race(buffer, 2 + num_left, 2, version=version)
    leases = await run_all(buffer, group, version=version)
    assert await win(buffer, *leases[:2]) is GroupState.READY
    return group, leases[2:]


def states(group: Group) -> list[tuple[SampleState, int]]:
    return [(s.state, s.num_tokens) for s in group.samples]


async def test_the_wanted_number_of_scored_samples_makes_the_group(buffer: Any) -> None:
    group = await race(buffer, 5, 2)
    leases = await run_all(buffer, group)
    await buffer.finish(leases[4], None, FinishReason.STOP)  # finished, and not scored in time
    await buffer.park(leases[3], None)
    assert await win(buffer, leases[1]) is GroupState.OPEN
    assert await win(buffer, leases[0]) is GroupState.READY
    (ready,) = await buffer.groups([group.group_id])
    assert [s.index for s in ready.samples] == [0, 1]
    assert {s.state for s in ready.samples} == {SampleState.SCORED}
    snapshot = await buffer.snapshot()
    assert snapshot.pool == PoolLedger(
        entered=3, pooled=3, num_bytes=3 * POOLED_BYTES + 8 * (5 + 6 + 7), expired=dict.fromkeys(ExpiryReason, 0)
    )
    assert snapshot.samples[SampleState.POOLED] == 3
    assert await buffer.open_samples() == []
    (brief,) = await buffer.open_groups()
    assert (brief.num_samples, brief.num_scored, brief.oldest_version) == (2, 2, 0)


async def test_only_what_ran_may_still_hand_in_tokens(buffer: Any) -> None:
    group = await race(buffer, 3, 1)
    winner, parked, finished = await run_all(buffer, group)
    await buffer.park(parked, None)
    await buffer.finish(finished, None, FinishReason.STOP)
    await win(buffer, winner)
    for lease, start in ((parked, 4), (finished, 5)):
        with pytest.raises(FencedError):
            await buffer.append(lease, piece(start, 1))


async def test_nothing_moves_a_sample_that_left_its_group(buffer: Any, rig: Rig) -> None:
    _, (running, other) = await pooled_run(buffer)
    await buffer.finish(other, piece(6, 1), FinishReason.STOP)
    before = rig.fingerprint()
    for sample_id in (running.sample_id, other.sample_id):
        with pytest.raises(NotFoundError):
            await buffer.score(sample_id, Reward(1.0), 1)
        with pytest.raises(NotFoundError):
            await buffer.fail(sample_id, FailReason.REWARD_ERROR, "late", 1)
        with pytest.raises(NotFoundError):
            await start_one(buffer, sample_id)
    assert await buffer.renew([running, other], LONG_S) == [running, other]
    assert await buffer.record_failure(running, "the engine died", 1) is None
    assert await buffer.park_expired(9) == []
    with pytest.raises(TransitionError):
        await buffer.append(other, piece(7, 1))  # it has finished
    assert rig.fingerprint() == before


async def test_whoever_ran_it_hands_in_its_last_tokens(buffer: Any, rig: Rig) -> None:
    _, (first, second) = await pooled_run(buffer)
    for _ in range(2):
        await buffer.append(first, piece(5, 2, 1))
    for _ in range(2):
        await buffer.park(first, piece(7, 2, 1))
    await buffer.park(first, None)
    for _ in range(2):
        await buffer.finish(second, piece(6, 1), FinishReason.LENGTH)
    a, b = await buffer.samples([first.sample_id, second.sample_id])
    assert (a.state, a.num_tokens, a.finish_reason) == (SampleState.POOLED, 9, None)
    assert (b.state, b.num_tokens, b.finish_reason) == (SampleState.POOLED, 7, FinishReason.LENGTH)
    assert (await buffer.snapshot()).pool.num_bytes == 2 * POOLED_BYTES + 8 * 16
    with pytest.raises(FencedError):
        await buffer.park(SampleLease(first.sample_id, "other", first.attempt), None)


async def test_a_prompt_that_comes_up_again_continues_its_samples_under_new_ids(buffer: Any) -> None:
    _, (first, second) = await pooled_run(buffer, version=3)
    await buffer.park(first, piece(5, 2, 4))
    await buffer.finish(second, None, FinishReason.STOP)
    before = await buffer.samples([first.sample_id, second.sample_id])
    await race(buffer, 3, 2, n=1)  # another prompt has nothing to do with it
    group = await race(buffer, 4, 2, version=4)
    assert states(group) == [
        (SampleState.PARKED, 7),
        (SampleState.FINISHED, 6),
        (SampleState.QUEUED, 0),
        (SampleState.QUEUED, 0),
    ]
    for old, new in zip(before, group.samples[:2], strict=True):
        assert new.continued_from == old.sample_id
        assert plain(new.segments) == plain(old.segments)
    snapshot = await buffer.snapshot()
    assert (snapshot.pool.entered, snapshot.pool.pooled, snapshot.pool.continued) == (2, 0, 2)
    assert snapshot.pool.num_bytes == 0
    assert [b.oldest_version for b in await buffer.open_groups() if b.group_id == group.group_id] == [3]
    for lease in (first, second):
        with pytest.raises(NotFoundError):
            await buffer.samples([lease.sample_id])
        with pytest.raises(FencedError):
            await buffer.append(lease, piece(9, 1))
    lease = await start_one(buffer, group.samples[0].sample_id)
    assert lease.attempt > first.attempt
    await buffer.finish(lease, piece(7, 1, 5), FinishReason.STOP)
    assert await buffer.score(group.samples[1].sample_id, Reward(1.0), 1) is GroupState.OPEN
    assert await buffer.score(lease.sample_id, Reward(1.0), 1) is GroupState.READY
    (ready,) = await buffer.groups([group.group_id])
    assert ready.samples[0].versions.tolist() == [3] * 5 + [4] * 2 + [5]
    assert ready.samples[0].num_resumes == 1
    assert (await buffer.snapshot()).pool.expired[ExpiryReason.EMPTY] == 0


async def test_the_oldest_go_on_first_then_the_longest(buffer: Any) -> None:
    group = await race(buffer, 5, 1)
    leases = await buffer.start([s.sample_id for s in group.samples], "w", LONG_S)
    for lease, num_tokens, version in zip(leases, (1, 4, 9, 2, 9), (0, 2, 2, 1, 3), strict=True):
        await buffer.append(lease, piece(0, num_tokens, version))
    await win(buffer, leases[0])
    group = await race(buffer, 3, 3)
    assert [s.num_tokens for s in group.samples] == [2, 9, 4]
    assert (await buffer.snapshot()).samples[SampleState.POOLED] == 1  # what found no place waits on


async def test_a_prompt_that_comes_twice_in_one_admission_continues_each_sample_once(buffer: Any) -> None:
    await pooled_run(buffer, num_left=3)
    new = [NewGroup(prompt(0), 2, 1), NewGroup(prompt(0), 2, 1)]
    groups = await buffer.admit(new, 0, CursorMove("1", "3"))
    assert [s.num_tokens for g in groups for s in g.samples] == [7, 6, 5, 0]


async def test_an_admission_is_prepared_again_if_a_sample_left_the_pool_meanwhile(buffer: Any, rig: Rig) -> None:
    if rig.kind == "memory":
        pytest.skip("nothing comes in between there")
    _, (first, second) = await pooled_run(buffer)
    admission = buffer.inner._admission
    prepare, prepared = admission._continued, list[Any]()

    async def prepare_and_lose_one(*args: Any) -> Any:
        prepared.append(await prepare(*args))
        if len(prepared) == 1:
            await admission._expire([first.sample_id], ExpiryReason.FULL)
        return prepared[-1]

    admission._continued = prepare_and_lose_one
    group = await race(buffer, 2, 2)
    assert [s.continued_from for s in group.samples] == [second.sample_id, None]
    assert [len(chosen) for chosen, _ in prepared] == [2, 1]


async def test_what_is_too_old_for_its_group_expires(buffer: Any) -> None:
    group = await race(buffer, 4, 1)
    leases = await buffer.start([s.sample_id for s in group.samples], "w", LONG_S)
    for version, lease in enumerate(leases):
        await buffer.append(lease, piece(0, 2, version))
    await win(buffer, leases[3])
    group = await race(buffer, 4, 2, oldest_version=1, version=4)
    assert [s.versions.tolist() for s in group.samples] == [[1, 1], [2, 2], [], []]
    assert [b.oldest_version for b in await buffer.open_groups()][-1] == 1
    pool = (await buffer.snapshot()).pool
    assert (pool.continued, pool.expired[ExpiryReason.STALE]) == (2, 1)


async def test_with_epoch_lag_any_age_goes_on_and_does_not_age_the_group(buffer: Any) -> None:
    await pooled_run(buffer, version=0)
    group = await race(buffer, 3, 3, oldest_version=None, version=90)
    assert [s.num_tokens for s in group.samples] == [6, 5, 0]
    assert (await buffer.open_groups())[-1].oldest_version is None
    await buffer.append(await start_one(buffer, group.samples[1].sample_id), piece(5, 1, 91))
    assert (await buffer.open_groups())[-1].oldest_version == 91
    assert (await buffer.samples([group.samples[1].sample_id]))[0].versions.tolist() == [0] * 5 + [91]


async def test_a_group_that_wants_all_parts_with_none_and_takes_what_is_pooled(buffer: Any) -> None:
    await pooled_run(buffer)
    before = (await buffer.snapshot()).cursor
    (group,) = await buffer.admit([NewGroup(prompt(0), 3)], 0, CursorMove(before, "2"))
    assert [s.num_tokens for s in group.samples] == [6, 5, 0]
    for lease in await run_all(buffer, group):
        await win(buffer, lease)
    snapshot = await buffer.snapshot()
    assert (snapshot.ledger.ready, snapshot.pool.pooled, snapshot.pool.continued) == (2, 0, 2)


async def test_failed_samples_stay_in_the_group(buffer: Any) -> None:
    group = await race(buffer, 4, 3)
    leases = await run_all(buffer, group)
    for lease in leases[:2]:
        await buffer.fail(lease.sample_id, FailReason.ENGINE_ERROR, "broken", 1)
    assert await win(buffer, leases[2]) is GroupState.OPEN
    assert await win(buffer, leases[3]) is GroupState.READY  # fewer than it wanted, and nobody is left
    (ready,) = await buffer.groups([group.group_id])
    assert [s.state for s in ready.samples] == [SampleState.FAILED] * 2 + [SampleState.SCORED] * 2
    assert (await buffer.snapshot()).pool.entered == 0


async def test_a_failure_can_make_the_group_part(buffer: Any) -> None:
    group = await race(buffer, 3, 2)
    leases = await run_all(buffer, group)
    await win(buffer, leases[0])
    assert await buffer.record_failure(leases[1], "dead", 1) is GroupState.OPEN
    assert await win(buffer, leases[2]) is GroupState.READY
    assert [s.index for s in (await buffer.groups([group.group_id]))[0].samples] == [0, 1, 2]


async def test_a_group_that_was_dropped_leaves_nothing_in_the_pool(buffer: Any) -> None:
    group = await race(buffer, 3, 1)
    await run_all(buffer, group)
    await buffer.drop(group.group_id, DropReason.OPERATOR)
    assert (await buffer.snapshot()).pool == PoolLedger()
    ready, _ = await pooled_run(buffer)
    await buffer.drop(ready.group_id, DropReason.FILTERED)  # those that left it are not its own any more
    assert (await buffer.snapshot()).pool.pooled == 2


async def test_pooled_samples_outlive_their_group(buffer: Any) -> None:
    epoch = (await buffer.open_trainer(0)).trainer_epoch
    _, (first, second) = await pooled_run(buffer)
    await buffer.offer(1)
    lease = await buffer.lease_batch(1, epoch, 1)
    await buffer.record_spool(1, "abc")
    assert [s.num_tokens for s in (await buffer.groups(lease.group_ids))[0].samples] == [0, 0]  # in the spool now
    assert [s.num_tokens for s in await buffer.samples([first.sample_id, second.sample_id])] == [5, 6]
    await buffer.ack(1, epoch)
    await buffer.append(first, piece(5, 2, 0))
    group = await race(buffer, 2, 1)
    assert [s.num_tokens for s in group.samples] == [7, 6]
    assert (await buffer.snapshot()).ledger.consumed == 1


async def test_what_never_had_a_token_is_not_kept(buffer: Any) -> None:
    group = await race(buffer, 4, 1)
    winner, running, late = await buffer.start([s.sample_id for s in group.samples[:3]], "w", LONG_S)
    await win(buffer, winner)
    assert (await buffer.snapshot()).pool.pooled == 3
    await buffer.append(late, piece(0, 4))  # it was written down after the race
    again = await race(buffer, 2, 1)
    assert [s.num_tokens for s in again.samples] == [4, 0]
    assert await buffer.expire_pooled(0) == 2
    pool = (await buffer.snapshot()).pool
    assert (pool.pooled, pool.expired[ExpiryReason.EMPTY]) == (0, 2)
    with pytest.raises(FencedError):
        await buffer.park(running, piece(0, 1))
    assert await buffer.expire_pooled(0) == 0


async def test_old_ones_expire_when_a_version_makes_them_useless(buffer: Any) -> None:
    await pooled_run(buffer, version=2)
    assert await buffer.expire_pooled(2) == 0
    assert await buffer.expire_pooled(3) == 2
    assert (await buffer.snapshot()).pool.expired[ExpiryReason.STALE] == 2


async def test_the_pool_is_bounded_and_the_oldest_go(rig: Rig) -> None:
    room = 3 * (POOLED_BYTES + 8 * 10)
    service = await rig.service(Limits(max_pool_bytes=room))
    await service.claim_service("first")
    for n in range(20):
        group = await race(service, 3, 1, n=n, version=n)
        leases = await run_all(service, group, version=n)
        await win(service, leases[0])
        assert (await service.snapshot()).pool.num_bytes <= room
    pool = (await service.snapshot()).pool
    assert (pool.entered, pool.pooled, pool.expired[ExpiryReason.FULL]) == (40, 3, 37)
    (group,) = [await race(service, 3, 1, n=19)]  # the newest are the ones that are left
    assert [s.num_tokens for s in group.samples] == [5, 4, 0]
    await service.close()


async def test_a_pool_of_no_bytes_keeps_nothing(rig: Rig) -> None:
    service = await rig.service(Limits(max_pool_bytes=0))
    await service.claim_service("first")
    await pooled_run(service)
    assert (await service.snapshot()).pool.expired[ExpiryReason.FULL] == 2
    await service.close()


async def test_what_is_reserved_for_samples_that_left_is_free_again(rig: Rig) -> None:
    service = await rig.service(Limits(max_bytes=4000, sample_bytes=1000))
    await service.claim_service("first")
    await pooled_run(service, num_left=2)
    assert (await service.snapshot()).held_bytes == 2000
    await race(service, 2, 1)
    assert (await service.snapshot()).held_bytes == 4000
    await service.close()


async def test_a_service_that_dies_leaves_its_pool_to_the_next(buffer: Any, rig: Rig) -> None:
    _, (first, second) = await pooled_run(buffer)
    open_group = await race(buffer, 3, 2, n=1)
    await run_all(buffer, open_group)
    successor = await rig.service()
    await successor.claim_service("second")
    for lease in (first, second):  # what it had not handed in is lost, and nothing else
        with pytest.raises(FencedError):
            await buffer.append(lease, piece(5, 1))
    assert [s.state for s in await successor.open_samples()] == [SampleState.PARKED] * 3
    group = await race(successor, 3, 2)
    assert [s.num_tokens for s in group.samples] == [6, 5, 0]
    await successor.close()


async def test_a_group_wants_no_more_than_it_has(buffer: Any) -> None:
    for wanted in (0, 3):
        with pytest.raises(RequestError):
            await race(buffer, 2, wanted)
    (group,) = await admit(buffer, num_samples=2)
    assert await finish_group(buffer, group) is GroupState.READY
    await check(buffer.inner)


async def test_an_admission_that_is_refused_leaves_the_pool_as_it_is(buffer: Any) -> None:
    await pooled_run(buffer)
    before = await buffer.snapshot()
    too_old = NewGroup(prompt(0), 2, 2, 5)  # for which the pooled samples' version 0 is too old
    with pytest.raises(ConflictError):
        await buffer.admit([too_old], 5, CursorMove("elsewhere", "2"))
    assert (await buffer.snapshot()).pool == before.pool
    await buffer.admit([too_old], 5, CursorMove(before.cursor, "2"))
    assert (await buffer.snapshot()).pool.expired[ExpiryReason.STALE] == 2
