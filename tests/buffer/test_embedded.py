"""The embedded server comes back after it was killed, where its clients look for it."""

import asyncio
import errno
import os
import signal
from pathlib import Path

import pytest

from buffer import embedded
from buffer.embedded import MAX_SOCKET_PATH, EmbeddedRedis
from protocol.errors import UnavailableError
from rollout_service import main as service_main
from tests.buffer.helpers import redis_rig
from tests.support.simulated import until


@pytest.mark.parametrize("folder", ["redis", "r" * MAX_SOCKET_PATH], ids=["socket", "port"])
async def test_a_killed_server_is_revived_at_the_same_address_with_what_it_had(tmp_path: Path, folder: str) -> None:
    with EmbeddedRedis(tmp_path / folder) as server:
        assert not server.revive()
        url, pid = server.url, server.pid
        buffer = await redis_rig(url, patience_s=60).service()
        epoch = await buffer.claim_service("one")
        os.kill(pid, signal.SIGKILL)
        await until(server.revive)
        assert (server.url, server.pid != pid) == (url, True)
        assert (await buffer.snapshot()).service_epoch == epoch
        await buffer.close()


async def test_the_service_revives_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_main, "REDIS_CHECK_INTERVAL_S", 0.01)
    with EmbeddedRedis(tmp_path / "redis") as server:
        pid = server.pid
        keeping = asyncio.create_task(service_main.keep_redis(server, 60.0))
        os.kill(pid, signal.SIGKILL)
        await until(lambda: server.pid != pid)
        keeping.cancel()


async def test_a_server_that_cannot_start_again_is_tried_until_patience_has_run_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_main, "REDIS_CHECK_INTERVAL_S", 0.01)

    def full_disk(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with EmbeddedRedis(tmp_path / "redis") as server:
        keeping = asyncio.create_task(service_main.keep_redis(server, 60.0))
        with monkeypatch.context() as full:
            full.setattr(embedded, "_write_private", full_disk)
            os.kill(server.pid, signal.SIGKILL)
            await until(lambda: "No space left on device" in caplog.text)
            await asyncio.sleep(0.05)
            assert not keeping.done()
            assert not server.owned
        await until(lambda: server.owned)
        await until(lambda: "was started again" in caplog.text)
        assert caplog.text.count("is tried to start again") == 1
        keeping.cancel()
        monkeypatch.setattr(embedded, "_write_private", full_disk)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(UnavailableError, match=r"ended and did not start again: .*No space left"):
            await service_main.keep_redis(server, 0.0)


async def test_a_server_that_another_process_started_meanwhile_is_used_and_followed(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as server, EmbeddedRedis(tmp_path / "redis") as other:
        assert not other.owned
        os.kill(server.pid, signal.SIGKILL)
        started = False
        with EmbeddedRedis(tmp_path / "redis") as third:
            await until(server.revive)
            started = third.owned
            assert server.owned is not started
            assert not server.revive()
        if started:
            await until(server.revive)
        assert server.owned
