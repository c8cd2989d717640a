"""Contract: one service owns a run; whoever was superseded changes nothing."""

import subprocess
import sys
from typing import Any

import pytest

from buffer.epochs import Epochs
from buffer.interface import CursorMove, NewGroup
from protocol.errors import FencedError, SettingsError, TransitionError
from protocol.messages import PolicyState, SettingsChange
from protocol.samples import Prompt, Reward
from protocol.states import DropReason, FailReason, FinishReason, SampleState
from tests.buffer.helpers import LONG_S, Known, Rig, admit, finish_group, leased_run, piece, start_one


async def test_a_superseded_service_changes_nothing(buffer: Any, rig: Rig) -> None:
    epoch, _ = await leased_run(buffer, 1)
    (group,) = await admit(buffer)
    lease = await start_one(buffer, group.samples[0].sample_id)
    sample_id, other_id = (s.sample_id for s in group.samples)
    successor = await rig.service()
    assert await successor.claim_service("second") == 2
    before = rig.fingerprint()
    calls = {
        "open_trainer": lambda: buffer.open_trainer(0),
        "admit": lambda: buffer.admit([NewGroup(Prompt("p", (1,), "", "s"), 1)], 0, CursorMove("2", "3")),
        "start": lambda: buffer.start([other_id], "w", LONG_S),
        "park_expired": lambda: buffer.park_expired(1),
        "renew": lambda: buffer.renew([lease], LONG_S),
        "append": lambda: buffer.append(lease, piece(0, 1)),
        "park": lambda: buffer.park(lease, None),
        "finish": lambda: buffer.finish(lease, None, FinishReason.STOP),
        "record_failure": lambda: buffer.record_failure(lease, "x", 1),
        "score": lambda: buffer.score(sample_id, Reward(1.0), 1),
        "fail": lambda: buffer.fail(sample_id, FailReason.ENGINE_ERROR, "", 1),
        "drop": lambda: buffer.drop(group.group_id, DropReason.OPERATOR),
        "offer": lambda: buffer.offer(1),
        "resize_offers": lambda: buffer.resize_offers(2),
        "lease_batch": lambda: buffer.lease_batch(1, epoch, 1),
        "record_spool": lambda: buffer.record_spool(1, "abc"),
        "mark_trained": lambda: buffer.mark_trained(1, epoch),
        "ack": lambda: buffer.ack(1, epoch),
        "publish_policy": lambda: buffer.publish_policy(1, "w", epoch),
        "set_policy_state": lambda: buffer.set_policy_state(0, PolicyState.FAILED, None, None),
        "record_change": lambda: buffer.record_change(SettingsChange(at=0.0, changes={}, by="x")),
    }
    for call in calls.values():
        with pytest.raises(FencedError):
            await call()
    assert rig.fingerprint() == before
    snapshot = await successor.snapshot()
    assert snapshot.counters["fenced_writes"] == len(calls)
    assert snapshot.service_epoch == 2
    await successor.offer(1)
    await successor.close()


async def test_a_service_that_never_claimed_only_reads_once_another_has(rig: Rig, buffer: Any) -> None:
    reader = await rig.service()
    await admit(buffer)
    assert (await reader.snapshot()).ledger.open == 1
    with pytest.raises(FencedError):
        await admit(reader)
    await reader.close()


async def test_a_run_keeps_its_identity_and_refuses_another(buffer: Any, rig: Rig) -> None:
    successor = await rig.service()
    assert await successor.claim_service("second", {"model": "m", "temperature": "1.0"}) == 2
    before = rig.fingerprint()
    with pytest.raises(SettingsError, match=r"a run with temperature = 1\.0 and this one has 0\.5"):
        await successor.claim_service("third", {"model": "m", "temperature": "0.5"})
    assert rig.fingerprint() == before
    assert await successor.claim_service("third", {"model": "m", "temperature": "1.0", "new": "x"}) == 3
    with pytest.raises(SettingsError, match="new = x"):
        await successor.claim_service("fourth", {"new": "y"})
    await successor.close()


async def test_epochs_begin_above_those_that_are_known_elsewhere(buffer: Any, rig: Rig) -> None:
    keeper, successor = Known(7, 4), await rig.service()
    assert await successor.claim_service("second", None, keeper) == 8
    for epoch in range(5):
        with pytest.raises(FencedError):
            await successor.mark_trained(0, epoch)
    opened = await successor.open_trainer(0)
    assert opened.trainer_epoch == 6, "5 is nobody's: whoever had 4 must be fenced already"
    assert keeper.told == [Epochs(8, 5), Epochs(8, 6)]
    assert await successor.claim_service("third", None, Known(1, 1)) == 9
    assert await successor.mark_trained(0, 6) == 0, "a session outlives its service"
    await successor.close()


async def test_an_epoch_that_was_never_given_out_speaks_of_a_lost_buffer(buffer: Any) -> None:
    await buffer.open_trainer(0)
    with pytest.raises(FencedError, match=r"trainer epoch 9 was not given out by this buffer, which has come to 1"):
        await buffer.mark_trained(0, 9)


async def test_samples_longer_than_a_limit_are_counted_until_they_are_leased(buffer: Any) -> None:
    await leased_run(buffer, 1)
    ready, still_open = await admit(buffer, 2)
    await finish_group(buffer, ready, num_tokens=9)
    await buffer.park(await start_one(buffer, still_open.samples[0].sample_id), piece(0, 8))
    assert [await buffer.count_longer(n) for n in (3, 7, 8, 9)] == [3, 3, 2, 0]


async def test_claiming_sets_aside_what_ran_before(buffer: Any, rig: Rig) -> None:
    (group,) = await admit(buffer, num_samples=3)
    a, b, c = (s.sample_id for s in group.samples)
    with_tokens = await start_one(buffer, a)
    await buffer.append(with_tokens, piece(0, 3, 4))
    await start_one(buffer, b)
    await buffer.finish(await start_one(buffer, c), piece(0, 1), FinishReason.STOP)
    successor = await rig.service()
    await successor.claim_service("second")
    assert [(s.sample_id, s.state) for s in await successor.open_samples()] == [
        (a, SampleState.PARKED),
        (b, SampleState.QUEUED),
        (c, SampleState.FINISHED),
    ]
    with pytest.raises(FencedError):
        await successor.append(with_tokens, piece(3, 1))
    lease = await start_one(successor, a)
    assert lease.attempt == with_tokens.attempt + 1
    await successor.append(lease, piece(3, 1, 5))
    (sample,) = await successor.samples([a])
    assert (sample.num_tokens, sample.num_resumes) == (4, 1)
    await successor.close()


async def test_a_run_goes_on_where_another_object_left_it(buffer: Any, rig: Rig) -> None:
    epoch, groups = await leased_run(buffer, 2)
    for group in await admit(buffer, 2):
        await finish_group(buffer, group)
    await buffer.offer(1)
    successor = await rig.service()
    await successor.claim_service("second")
    assert await successor.snapshot() == await buffer.snapshot()
    lease = await successor.lease_batch(3, epoch, 1)
    assert lease is not None
    assert lease.group_ids != (groups[0].group_id,)
    assert [x.step for x in await successor.ack(3, epoch)] == [1, 2, 3]
    await successor.close()


async def test_the_audit_record_keeps_order_and_is_bounded(buffer: Any) -> None:
    lines = [SettingsChange(at=float(n), changes={"ratio": (1.0, n)}, by="operator") for n in range(3)]
    for line in lines:
        await buffer.record_change(line)
    stored = await buffer.changes()
    assert [c.at for c in stored] == [0.0, 1.0, 2.0]
    assert stored[1].changes["ratio"][1] == 1
    for n in range(1000):
        await buffer.inner.record_change(SettingsChange(at=float(n + 3), changes={}, by="x"))
    assert [c.at for c in await buffer.changes()] == [float(n) for n in range(3, 1003)]


async def test_states_refuse_what_the_table_lacks(buffer: Any) -> None:
    (group,) = await admit(buffer)
    sample_id = group.samples[0].sample_id
    with pytest.raises(TransitionError):
        await buffer.score(sample_id, Reward(1.0), 1)
    lease = await start_one(buffer, sample_id)
    with pytest.raises(TransitionError):
        await buffer.score(sample_id, Reward(1.0), 1)
    await buffer.finish(lease, piece(0, 1), FinishReason.STOP)
    with pytest.raises(TransitionError):
        await start_one(buffer, sample_id)
    with pytest.raises(TransitionError):
        await buffer.record_failure(lease, "late", 1)
    await buffer.score(sample_id, Reward(1.0), 1)
    with pytest.raises(TransitionError):
        await buffer.fail(sample_id, FailReason.REWARD_ERROR, "late", 1)


def test_the_twin_needs_no_redis_client() -> None:
    code = "import sys; sys.modules['redis'] = None; from buffer.memory import MemoryBuffer; MemoryBuffer()"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
