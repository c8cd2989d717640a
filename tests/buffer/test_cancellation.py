"""Who is cancelled while it waits for Redis ends, whatever moment the cancellation comes at."""

import asyncio
from typing import Any

import pytest

from buffer.redis_buffer import RedisBuffer

MOMENTS = 120  # turns of the event loop after which it is cancelled; a round trip takes about a dozen
TURNS = 2000  # that an ended task may take to end: far more than its clean-up needs


async def _for_ever(buffer: RedisBuffer) -> None:
    while True:
        await buffer.snapshot()


@pytest.mark.parametrize("rig", ["redis"], indirect=True)
async def test_a_cancellation_is_never_lost(buffer: Any) -> None:
    survivors: list[int] = []
    for moment in range(MOMENTS):
        task = asyncio.create_task(_for_ever(buffer))
        for _ in range(moment):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=1)
        if not done:
            survivors.append(moment)
            task.cancel()
            await asyncio.wait({task})
    assert not survivors
