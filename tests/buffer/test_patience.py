"""Calls without an answer are repeated, happen once, and wait for a Redis that is away, stopped or full."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import ConnectionError, TimeoutError

from buffer.embedded import EmbeddedRedis
from buffer.interface import CursorMove, NewGroup
from buffer.redis_buffer import RedisBuffer
from protocol.errors import FencedError, UnavailableError
from protocol.messages import PolicyState, SettingsChange
from protocol.samples import Reward
from protocol.states import DropReason, FailReason, FinishReason, GroupState
from tests.buffer.helpers import LONG_S, admit, check, piece, plain, prompt, redis_rig

LONG_PATIENCE_S = 60.0


def inject(buffer: RedisBuffer, faults: Iterator[str]) -> None:
    """Lose what the buffer sends ("request") or what it is answered ("reply"), as `faults` say."""
    link = buffer._store.link
    use = link.use

    async def faulty(send: Callable[[Any], Awaitable[Any]]) -> Any:
        fault = next(faults)
        if fault == "request":
            raise ConnectionError("cut before it arrived")
        answer = await use(send)
        if fault == "reply":
            raise TimeoutError("cut before the answer arrived")
        return answer

    link.use = faulty  # pyright: ignore[reportAttributeAccessIssue]


async def whole_run(buffer: RedisBuffer) -> list[Any]:
    """Every transition at least once; what each of them returned."""
    said: list[Any] = [await buffer.claim_service("first")]
    opened = await buffer.open_trainer(0)
    epoch = opened.trainer_epoch
    groups = await buffer.admit([NewGroup(prompt(n), 2) for n in range(4)], 0, CursorMove("", "4"))
    ready, dropped, failed, broken = groups
    said += [opened, groups]
    for group in (ready, failed):
        leases = await buffer.start([s.sample_id for s in group.samples], "w", LONG_S)
        said += [leases, await buffer.renew(leases, LONG_S)]
        for lease in leases:
            await buffer.append(lease, piece(0, 3))
            await buffer.append(lease, piece(0, 3))
            await buffer.park(lease, piece(3, 1))
        leases = await buffer.start([s.sample_id for s in group.samples], "w", LONG_S)
        for lease in leases:
            await buffer.finish(lease, piece(4, 2, 1), FinishReason.STOP)
    said.append([await buffer.score(s.sample_id, Reward(1.0), 1) for s in ready.samples])
    said.append(await buffer.fail(failed.samples[0].sample_id, FailReason.REWARD_ERROR, "broken", 2))
    await buffer.drop(dropped.group_id, DropReason.OPERATOR)
    for sample in broken.samples:
        (lease,) = await buffer.start([sample.sample_id], "w", LONG_S)
        said.append(await buffer.record_failure(lease, "dead", 1))
    (last,) = await buffer.admit([NewGroup(prompt(9), 1)], 0, CursorMove("4", "5"))
    await buffer.start([last.samples[0].sample_id], "w", 0.0)
    said.append(await buffer.park_expired(5))
    said += [await buffer.offer(1), await buffer.offer(1), await buffer.lease_batch(1, epoch, 1)]
    await buffer.record_spool(1, "abc")
    said += [await buffer.mark_trained(1, epoch), await buffer.publish_policy(1, "w/1", epoch)]
    said.append(await buffer.set_policy_state(1, PolicyState.ACTIVE, None, 0.5))
    said.append(await buffer.ack(1, epoch))
    await buffer.record_change(SettingsChange(at=1.0, changes={}, by="x"))
    said += [*await pooled(buffer), await buffer.open_trainer(1), await buffer.claim_service("second")]
    return [*said, await buffer.snapshot(), await buffer.changes(), await buffer.open_samples()]


async def pooled(buffer: RedisBuffer) -> list[Any]:
    """A group parts with two of three samples, one of which goes on in the next group of the prompt."""
    (raced,) = await buffer.admit([NewGroup(prompt(20), 3, 1)], 1, CursorMove("5", "6"))
    first, second, third = await buffer.start([s.sample_id for s in raced.samples], "w", LONG_S)
    await buffer.append(second, piece(0, 2))
    await buffer.finish(first, piece(0, 1), FinishReason.STOP)
    said: list[Any] = [raced, await buffer.score(first.sample_id, Reward(1.0), 1)]
    await buffer.append(second, piece(2, 1))
    await buffer.park(second, piece(3, 1))
    await buffer.finish(third, piece(0, 1), FinishReason.LENGTH)
    said += [await buffer.samples([second.sample_id, third.sample_id])]
    (again,) = await buffer.admit([NewGroup(prompt(20), 1)], 1, CursorMove("6", "7"))
    return [*said, again, await buffer.snapshot(), await buffer.expire_pooled(9)]


@pytest.mark.parametrize("faults", [["reply", "none"], ["request", "none"], ["reply", "request", "reply", "none"]])
async def test_a_run_whose_every_call_is_repeated_is_the_same_run(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, faults: list[str]
) -> None:
    monkeypatch.setattr("buffer.patience.FIRST_WAIT_S", 0.0)
    outcomes: list[Any] = []
    for injected in (["none"], faults):
        buffer = await RedisBuffer.connect(
            redis_server.url, namespace=f"faulty-{os.urandom(6).hex()}", patience_s=LONG_PATIENCE_S
        )
        inject(buffer, cycle(injected))
        outcomes.append(plain(await whole_run(buffer)))
        await check(buffer)
        await buffer.close()
    assert outcomes[0] == outcomes[1]


async def test_answers_are_kept_for_a_bounded_number_of_calls(redis_server: EmbeddedRedis) -> None:
    rig = redis_rig(redis_server.url)
    buffer = await rig.connect()
    keys = buffer._store.keys

    async def change(n: int) -> None:
        await buffer.record_change(SettingsChange(at=float(n), changes={}, by="x"))

    for first in range(0, 4200, 300):
        await asyncio.gather(*(change(n) for n in range(first, first + 300)))
    with redis.Redis.from_url(redis_server.url) as client:
        assert client.hlen(keys.named("repeats")) == client.llen(keys.named("repeat_order")) == 4096
    await buffer.close()


def kill(server: EmbeddedRedis) -> None:
    os.kill(server.pid, signal.SIGKILL)
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)


async def begun(buffer: RedisBuffer) -> float:
    """When the buffer began to wait."""
    while buffer.waiting_since is None:  # noqa: ASYNC110  what is polled belongs to the buffer, not to the test
        await asyncio.sleep(0.01)
    return buffer.waiting_since


async def test_calls_wait_for_a_server_that_was_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = EmbeddedRedis(tmp_path / "redis").start()
    buffer = await RedisBuffer.connect(server.url, patience_s=LONG_PATIENCE_S)
    await buffer.claim_service("first")
    (group,) = await admit(buffer)
    leases = await buffer.start([s.sample_id for s in group.samples], "w", LONG_S)
    assert buffer.waiting_since is None
    kill(server)
    with caplog.at_level(logging.INFO, "buffer.patience"):
        before = time.time()
        calls = [asyncio.create_task(buffer.append(lease, piece(0, 4))) for lease in leases]
        assert await begun(buffer) >= before - 1
        view = buffer.impatient()
        with pytest.raises(UnavailableError):
            await view.append(leases[0], piece(0, 4))
        assert view.waiting_since is not None
        with EmbeddedRedis(tmp_path / "redis"):
            await asyncio.gather(*calls)
            assert buffer.waiting_since is None
            await view.park(leases[0], None)  # a view has the epoch of its buffer
            await view.close()
            await check(buffer)
            assert (await buffer.snapshot()).counters["tokens_appended"] == 8
    assert [r.getMessage().partition(":")[0].split(" after ")[0] for r in caplog.records] == [
        "waiting for Redis",
        "Redis answers again",
    ]
    await buffer.close()
    server.stop()


async def test_patience_runs_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = EmbeddedRedis(tmp_path / "redis").start()
    buffer = await RedisBuffer.connect(server.url, patience_s=0.3)
    server.stop()
    with pytest.raises(UnavailableError):
        await buffer.snapshot()
    assert buffer.waiting_since is None
    assert "given up" in caplog.text
    await buffer.close()


async def test_who_waits_can_be_cancelled(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / "redis").start()
    buffer = await RedisBuffer.connect(server.url, patience_s=LONG_PATIENCE_S)
    server.stop()
    call = asyncio.create_task(buffer.snapshot())
    await begun(buffer)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert buffer.waiting_since is None
    await buffer.close()


async def test_a_server_that_accepts_and_never_answers_is_noticed(
    own_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer.connection.ANSWER_TIMEOUT_S", 0.2)
    buffer = await RedisBuffer.connect(own_server.url, patience_s=LONG_PATIENCE_S)
    await buffer.claim_service("first")
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        call = asyncio.create_task(admit(buffer, 3))
        await begun(buffer)
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    assert len(await call) == 3
    assert (await buffer.snapshot()).ledger.admitted == 3
    await buffer.close()


async def test_a_server_that_is_stopped_is_known_to_be_away_before_the_call_fails(
    own_server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = await RedisBuffer.connect(own_server.url, patience_s=LONG_PATIENCE_S)
    await buffer.claim_service("first")
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        before = time.time()
        call = asyncio.create_task(buffer.snapshot())
        assert await begun(buffer) >= before
        assert not caplog.records, "nothing has failed yet"
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    await call
    assert buffer.waiting_since is None
    await buffer.close()


async def test_growth_waits_for_memory_and_draining_does_not(own_server: EmbeddedRedis) -> None:
    buffer = await RedisBuffer.connect(own_server.url, patience_s=LONG_PATIENCE_S)
    await buffer.claim_service("first")
    (group,) = await admit(buffer)
    first, second = await buffer.start([s.sample_id for s in group.samples], "w", LONG_S)
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory", "1")
        call = asyncio.create_task(buffer.append(first, piece(0, 3)))
        await begun(buffer)
        await buffer.finish(second, piece(0, 3), FinishReason.STOP)
        assert await buffer.score(second.sample_id, Reward(1.0), 1) is GroupState.OPEN
        assert not call.done()
        client.config_set("maxmemory", "0")
    await call
    await check(buffer)
    await buffer.close()


async def test_a_refusal_is_not_repeated(redis_server: EmbeddedRedis) -> None:
    rig = redis_rig(redis_server.url)
    buffer, successor = await rig.connect(), await rig.connect()
    await buffer.claim_service("first")
    await successor.claim_service("second")
    buffer._store.patience_s = LONG_PATIENCE_S
    with pytest.raises(FencedError):
        await buffer.offer(1)
    assert (await successor.snapshot()).counters["fenced_writes"] == 1
    for each in (buffer, successor):
        await each.close()
