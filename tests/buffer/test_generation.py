"""Contract: admission, leases of samples, growth, parking, order."""

from typing import Any

import numpy as np
import pytest

from buffer.interface import CursorMove, NewGroup, SampleLease
from protocol.errors import (
    ConflictError,
    DataError,
    FencedError,
    LengthError,
    NotFoundError,
    RequestError,
    TransitionError,
)
from protocol.samples import Prompt, Reward
from protocol.states import FinishReason, GroupState, SampleState
from tests.buffer.helpers import LONG_S, Rig, admit, piece, plain, prompt, start_one


async def test_admit_makes_open_groups_of_queued_samples(buffer: Any) -> None:
    groups = await buffer.admit([NewGroup(prompt(0), 2), NewGroup(prompt(1), 3)], 7, CursorMove("", "2"))
    assert [len(g.samples) for g in groups] == [2, 3]
    assert [g.seq for g in groups] == [0, 1]
    assert plain(await buffer.groups([g.group_id for g in groups])) == plain(groups)
    snapshot = await buffer.snapshot()
    assert (snapshot.ledger.admitted, snapshot.ledger.open, snapshot.cursor) == (2, 2, "2")
    assert snapshot.samples[SampleState.QUEUED] == 5
    briefs = await buffer.open_groups()
    assert [(b.seq, b.state, b.admitted_version, b.num_samples) for b in briefs] == [
        (0, GroupState.OPEN, 7, 2),
        (1, GroupState.OPEN, 7, 3),
    ]


async def test_cursor_moves_only_from_where_it_is(buffer: Any, rig: Rig) -> None:
    await buffer.admit([NewGroup(prompt(), 2)], 0, CursorMove("", "1"))
    before = rig.fingerprint()
    with pytest.raises(ConflictError):
        await buffer.admit([NewGroup(prompt(), 2)], 0, CursorMove("", "1"))
    assert rig.fingerprint() == before
    await buffer.admit([], 0, CursorMove("1", "9"))
    assert (await buffer.snapshot()).cursor == "9"


@pytest.mark.parametrize("num_samples", [0, 1000])
async def test_a_group_that_cannot_be_numbered_is_refused(buffer: Any, num_samples: int) -> None:
    with pytest.raises(RequestError):
        await buffer.admit([NewGroup(prompt(), num_samples)], 0, CursorMove("", "1"))


async def test_a_prompt_that_is_not_json_is_refused(buffer: Any) -> None:
    strange = Prompt("p", (1,), "", "s", extra={"a": object()})
    with pytest.raises(DataError):
        await buffer.admit([NewGroup(strange, 2)], 0, CursorMove("", "1"))
    assert (await buffer.snapshot()).ledger.admitted == 0


async def test_a_sample_keeps_every_token_with_version_and_logprob(buffer: Any) -> None:
    (group,) = await admit(buffer)
    sample_id = group.samples[0].sample_id
    lease = await start_one(buffer, sample_id)
    await buffer.append(lease, piece(0, 5, 0))
    await buffer.append(lease, piece(5, 2, 0))
    await buffer.append(lease, piece(7, 3, 2, kv_kept=True))
    await buffer.park(lease, piece(10, 1, 2, kv_kept=True))
    lease = await start_one(buffer, sample_id)
    await buffer.finish(lease, piece(11, 4, 3), FinishReason.LENGTH)
    (sample,) = await buffer.samples([sample_id])
    expected = [piece(0, 7, 0), piece(7, 4, 2, kv_kept=True), piece(11, 4, 3)]
    assert plain(sample.segments) == plain(expected)
    assert sample.finish_reason is FinishReason.LENGTH
    assert (sample.num_tokens, sample.num_resumes) == (15, 1)
    (brief,) = [b for b in await buffer.open_samples() if b.sample_id == sample_id]
    assert (brief.state, brief.num_tokens, brief.oldest_version) == (SampleState.FINISHED, 15, 0)


async def test_logprobs_keep_their_bits(buffer: Any) -> None:
    (group,) = await admit(buffer)
    lease = await start_one(buffer, group.samples[0].sample_id)
    given = piece(0, 3)
    given.logprobs[:] = np.array([-1e-30, -0.1, -123.456], np.float32)
    given.tokens[:] = np.array([0, 2**31 - 1, 151_935], np.int32)
    await buffer.append(lease, given)
    (sample,) = await buffer.samples([lease.sample_id])
    assert sample.tokens.tobytes() == given.tokens.tobytes()
    assert sample.logprobs.tobytes() == given.logprobs.tobytes()


@pytest.mark.parametrize("start", [0, 4, 6])
async def test_a_piece_must_start_where_the_sample_ends(buffer: Any, rig: Rig, start: int) -> None:
    (group,) = await admit(buffer)
    lease = await start_one(buffer, group.samples[0].sample_id)
    await buffer.append(lease, piece(0, 5))
    before = rig.fingerprint()
    with pytest.raises(LengthError):
        await buffer.append(lease, piece(start, 2))
    with pytest.raises(LengthError):
        await buffer.park(lease, piece(start, 2))
    with pytest.raises(LengthError):
        await buffer.finish(lease, piece(start, 0), FinishReason.STOP)
    assert rig.fingerprint() == before


async def test_the_same_call_again_changes_nothing(buffer: Any, rig: Rig) -> None:
    (group,) = await admit(buffer)
    first, second = (s.sample_id for s in group.samples)
    lease = await start_one(buffer, first)
    await buffer.append(lease, piece(0, 5))
    before = rig.fingerprint()
    await buffer.append(lease, piece(0, 5))
    assert rig.fingerprint() == before
    other = piece(0, 5)
    other.logprobs[2] = -9.0
    with pytest.raises(LengthError):
        await buffer.append(lease, other)
    await buffer.park(lease, piece(5, 1))
    before = rig.fingerprint()
    await buffer.park(lease, piece(5, 1))
    await buffer.park(lease, None)
    assert rig.fingerprint() == before
    lease = await start_one(buffer, second)
    await buffer.finish(lease, piece(0, 2), FinishReason.STOP)
    before = rig.fingerprint()
    await buffer.finish(lease, piece(0, 2), FinishReason.STOP)
    with pytest.raises(TransitionError):
        await buffer.finish(lease, None, FinishReason.LENGTH)
    assert rig.fingerprint() == before
    await buffer.score(second, Reward(0.5), 1)
    before = rig.fingerprint()
    assert await buffer.score(second, Reward(0.5), 1) is GroupState.OPEN
    with pytest.raises(TransitionError):
        await buffer.score(second, Reward(0.6), 1)
    assert rig.fingerprint() == before
    assert (await buffer.snapshot()).counters["tokens_appended"] == 8


async def test_a_last_piece_that_was_checkpointed_already_is_not_doubled(buffer: Any) -> None:
    (group,) = await admit(buffer)
    lease = await start_one(buffer, group.samples[0].sample_id)
    await buffer.append(lease, piece(0, 5))
    await buffer.park(lease, piece(0, 5))
    (sample,) = await buffer.samples([lease.sample_id])
    assert (sample.state, sample.num_tokens) == (SampleState.PARKED, 5)


async def test_parking_without_a_token_queues_again(buffer: Any) -> None:
    (group,) = await admit(buffer)
    lease = await start_one(buffer, group.samples[0].sample_id)
    await buffer.park(lease, None)
    (sample,) = await buffer.samples([lease.sample_id])
    assert sample.state is SampleState.QUEUED
    again = await start_one(buffer, lease.sample_id)
    assert again.attempt == lease.attempt + 1
    counters = (await buffer.snapshot()).counters
    assert counters.get("resumes", 0) == 0


async def test_parked_samples_resume_oldest_version_first_then_by_admission(buffer: Any) -> None:
    groups = await admit(buffer, 3)
    a, b, c, d, e, f = (s.sample_id for g in groups for s in g.samples)
    for sample_id, version in ((a, 5), (b, 3), (d, 3), (c, 12)):
        await buffer.park(await start_one(buffer, sample_id), piece(0, 2, version))
    await buffer.finish(await start_one(buffer, e), piece(0, 1, 0), FinishReason.STOP)
    assert [s.sample_id for s in await buffer.open_samples()] == [b, d, a, c, f, e]
    await start_one(buffer, b)
    assert [(s.sample_id, s.state) for s in await buffer.open_samples()] == [
        (d, SampleState.PARKED),
        (a, SampleState.PARKED),
        (c, SampleState.PARKED),
        (f, SampleState.QUEUED),
        (b, SampleState.RUNNING),
        (e, SampleState.FINISHED),
    ]


async def test_start_takes_all_or_none(buffer: Any, rig: Rig) -> None:
    (group,) = await admit(buffer)
    first, second = (s.sample_id for s in group.samples)
    await start_one(buffer, second)
    before = rig.fingerprint()
    with pytest.raises(TransitionError):
        await buffer.start([first, second], "w", LONG_S)
    with pytest.raises(NotFoundError):
        await buffer.start([first, "g000000099.000"], "w", LONG_S)
    with pytest.raises(NotFoundError):
        await buffer.start([first, "no such"], "w", LONG_S)
    with pytest.raises(ConflictError):
        await buffer.start([first, first], "w", LONG_S)
    assert rig.fingerprint() == before
    assert await buffer.start([], "w", LONG_S) == []


async def test_a_lease_that_expired_is_taken_over_and_the_older_attempt_fenced(buffer: Any, rig: Rig) -> None:
    (group,) = await admit(buffer)
    sample_id = group.samples[0].sample_id
    (old,) = await buffer.start([sample_id], "a", 0.0)
    await buffer.append(old, piece(0, 3))
    (new,) = await buffer.start([sample_id], "b", LONG_S)
    assert new.attempt == old.attempt + 1
    before = rig.fingerprint()
    for call in (
        lambda: buffer.append(old, piece(3, 1)),
        lambda: buffer.park(old, None),
        lambda: buffer.finish(old, None, FinishReason.STOP),
        lambda: buffer.record_failure(old, "x", 1),
    ):
        with pytest.raises(FencedError):
            await call()
    assert await buffer.renew([old, new], LONG_S) == [old]
    after = rig.fingerprint()
    changed = {key for key in after if after[key] != before[key]}
    assert all("running" in str(key) or key == "groups" for key in changed)  # the lease of `new` was renewed
    await buffer.append(new, piece(3, 1))
    counters = (await buffer.snapshot()).counters
    assert counters["fenced_writes"] == 4
    assert (counters["leases_expired"], counters["resumes"], counters["samples_resumed"]) == (1, 1, 1)


async def test_an_expired_lease_that_nobody_took_may_be_renewed(buffer: Any) -> None:
    (group,) = await admit(buffer)
    sample_id = group.samples[0].sample_id
    leases = await buffer.start([sample_id], "a", 0.0)
    assert await buffer.renew(leases, LONG_S) == []
    with pytest.raises(TransitionError):
        await buffer.start([sample_id], "b", LONG_S)
    assert await buffer.renew([], LONG_S) == []


async def test_a_lease_of_another_worker_or_of_no_sample_is_fenced(buffer: Any) -> None:
    (group,) = await admit(buffer)
    lease = await start_one(buffer, group.samples[0].sample_id)
    for wrong in (
        SampleLease(lease.sample_id, "other", lease.attempt),
        SampleLease(lease.sample_id, lease.worker, lease.attempt + 1),
        SampleLease("g000000077.000", lease.worker, lease.attempt),
    ):
        with pytest.raises(FencedError):
            await buffer.append(wrong, piece(0, 1))
        assert await buffer.renew([wrong], LONG_S) == [wrong]
    assert (await buffer.snapshot()).counters["fenced_writes"] == 3


async def test_a_sample_that_does_not_run_does_not_grow(buffer: Any) -> None:
    (group,) = await admit(buffer)
    lease = await start_one(buffer, group.samples[0].sample_id)
    await buffer.park(lease, piece(0, 2))
    with pytest.raises(TransitionError):
        await buffer.append(lease, piece(2, 2))
    with pytest.raises(TransitionError):
        await buffer.finish(lease, None, FinishReason.STOP)
