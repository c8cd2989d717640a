"""What must survive a power loss is on disk when it is answered; what was acknowledged survives a killed server."""

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis

from buffer.embedded import EmbeddedRedis
from buffer.redis_buffer import RedisBuffer
from protocol.errors import UnavailableError
from protocol.messages import PolicyState
from tests.buffer.helpers import admit, check, leased_run, piece, plain, start_one
from tests.buffer.test_patience import kill


def num_waits(server: EmbeddedRedis) -> int:
    """How often this server was asked to wait for its AOF."""
    with redis.Redis.from_url(server.url) as client:
        return client.info("commandstats").get("cmdstat_waitaof", {}).get("calls", 0)


async def test_lease_ack_and_activation_wait_for_the_aof(own_server: EmbeddedRedis) -> None:
    buffer = await RedisBuffer.connect(own_server.url)
    assert buffer.waits_for_aof
    epoch, _ = await leased_run(buffer, 1)
    await buffer.publish_policy(1, "w/1", epoch)
    counts = [num_waits(own_server)]
    for call in (
        lambda: buffer.lease_batch(1, epoch, 1),
        lambda: buffer.set_policy_state(1, PolicyState.INSTALLING, None, None),
        lambda: buffer.set_policy_state(1, PolicyState.ACTIVE, None, None),
        lambda: buffer.lease_batch(2, epoch, 1),
        lambda: buffer.mark_trained(1, epoch),
        lambda: buffer.ack(1, epoch),
        lambda: buffer.ack(1, epoch),
    ):
        await call()
        counts.append(num_waits(own_server))
    # A repeated lease or ack may answer for one that nobody has waited for; what writes nothing of the kind waits not.
    assert [b - a for a, b in pairwise(counts)] == [1, 0, 1, 0, 0, 1, 1]
    await buffer.close()


async def test_an_answer_comes_after_the_sync(own_server: EmbeddedRedis) -> None:
    buffer = await RedisBuffer.connect(own_server.url)
    epoch, _ = await leased_run(buffer, 1)
    await buffer.ack(1, epoch)
    with redis.Redis.from_url(own_server.url) as client:
        assert client.info("persistence")["aof_pending_bio_fsync"] == 0
        assert client.execute_command("WAITAOF", 1, 0, 1)[0] == 1
    await buffer.close()


async def test_a_sync_that_does_not_come_is_no_answer(
    own_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await RedisBuffer.connect(own_server.url)
    epoch, _ = await leased_run(buffer, 1)
    monkeypatch.setattr("buffer.scripts.AOF_TIMEOUT_MS", 100)
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("appendfsync", "no")
        with pytest.raises(UnavailableError, match="disk"):
            await buffer.ack(1, epoch)
        client.config_set("appendfsync", "always")
    assert await buffer.ack(1, epoch) == []
    await buffer.close()


async def test_a_server_that_can_not_wait_is_said_once(
    own_server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    with redis.Redis.from_url(own_server.url) as client:
        client.execute_command("ACL", "SETUSER", "old", "on", ">secret", "~*", "+@all", "-waitaof")
        given: dict[str, Any] = {"username": "old", "password": "secret"}
        with caplog.at_level(logging.WARNING):
            buffer = await RedisBuffer.connect(own_server.url, **given)
            epoch, _ = await leased_run(buffer, 2)
            await buffer.ack(1, epoch)
        assert [("power loss" in r.getMessage()) for r in caplog.records] == [True]
        assert not buffer.waits_for_aof
        await buffer.close()


async def test_an_aof_that_is_switched_off_later_is_said_once(
    own_server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = await RedisBuffer.connect(own_server.url)
    epoch, _ = await leased_run(buffer, 2)
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("appendonly", "no")
    with caplog.at_level(logging.WARNING):
        await buffer.ack(1, epoch)
        await buffer.ack(2, epoch)
    assert len(caplog.records) == 1
    assert "no longer waits" in caplog.text
    await buffer.close()


async def test_waiting_can_be_switched_off(own_server: EmbeddedRedis) -> None:
    buffer = await RedisBuffer.connect(own_server.url, wait_aof=False)
    epoch, _ = await leased_run(buffer, 1)
    await buffer.ack(1, epoch)
    assert num_waits(own_server) == 0
    await buffer.close()


@pytest.mark.parametrize("mode", ["always", "everysec"])
async def test_a_killed_server_has_everything_that_was_acknowledged(tmp_path: Path, mode: str) -> None:
    server = EmbeddedRedis(tmp_path / "redis").start()
    with redis.Redis.from_url(server.url) as client:
        client.config_set("appendfsync", mode)
    buffer = await RedisBuffer.connect(server.url, patience_s=60.0)  # its connections are cut, too
    await buffer.claim_service("first")
    epoch, groups = await leased_run(buffer, 2)
    await buffer.ack(1, epoch)
    (group,) = await admit(buffer)
    lease = await start_one(buffer, group.samples[0].sample_id)
    for n in range(50):
        await buffer.append(lease, piece(20 * n, 20))
    ids = [groups[1].group_id, group.group_id]
    before = [await buffer.snapshot(), await buffer.batch_leases(), plain(await buffer.groups(ids))]
    kill(server)
    with EmbeddedRedis(tmp_path / "redis"):
        assert [await buffer.snapshot(), await buffer.batch_leases(), plain(await buffer.groups(ids))] == before
        await check(buffer)
    await buffer.close()
    server.stop()
