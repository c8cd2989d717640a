"""A real server for the session, and each test's own run on it or in memory."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from buffer.embedded import EmbeddedRedis
from tests.buffer.helpers import Rig, memory_rig, redis_rig


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
def rig(request: pytest.FixtureRequest) -> Rig:
    if request.param == "memory":
        return memory_rig()
    return redis_rig(request.getfixturevalue("redis_server").url)


@pytest.fixture
async def buffer(rig: Rig) -> AsyncIterator[Any]:
    """The service that owns the run."""
    service = await rig.service()
    await service.claim_service("first")
    yield service
    await service.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A server that the test may stop, fill or misconfigure."""
    with EmbeddedRedis(tmp_path / "redis") as server:
        yield server
