"""The embedded server comes back after it was killed, where its clients look for it."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from buffer.embedded import MAX_SOCKET_PATH, EmbeddedRedis
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
        keeping = asyncio.create_task(service_main.keep_redis(server))
        os.kill(pid, signal.SIGKILL)
        await until(lambda: server.pid != pid)
        keeping.cancel()
