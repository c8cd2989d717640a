"""Events: made once, shared by all, and never queued."""

import asyncio
import json
from collections import Counter

import pytest

from protocol.errors import UnavailableError
from rollout_service.watch import broadcast as broadcast_module
from rollout_service.watch.broadcast import Broadcast
from tests.support.simulated import until


class Source:
    """A status that counts how often it is made, and numbers of pictures."""

    def __init__(self) -> None:
        self.num_made = 0
        self.numbers = Counter({"tail": 0, "steps": 0, "moments": 0})
        self.error: Exception | None = None

    async def make(self) -> str:
        self.num_made += 1
        if self.error is not None:
            raise self.error
        return json.dumps({"made": self.num_made})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast_module, "INTERVAL_S", 0.01)


def parsed(chunk: bytes) -> list[dict[str, str]]:
    blocks = [block for block in chunk.decode().split("\n\n") if block]
    return [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]


async def test_a_thousand_listeners_cost_one_status_a_tick(quick: None) -> None:
    source = Source()
    broadcast = Broadcast(source.make, lambda: source.numbers)
    streams = [broadcast.stream() for _ in range(1000)]
    hello = await asyncio.gather(*(anext(stream) for stream in streams))
    assert set(hello) == {b"retry: 2000\n\n"}
    first = await asyncio.gather(*(anext(stream) for stream in streams))
    assert len(set(first)) == 1
    assert source.num_made <= 2
    (event,) = parsed(first[0])
    assert event["event"] == "status"
    assert event["id"].endswith("-1")
    for stream in streams:
        await stream.aclose()
    assert broadcast.num_listening == 0
    made = source.num_made
    await asyncio.sleep(0.05)
    assert source.num_made <= made + 1, "nobody listens: nothing is made"


async def test_a_slow_reader_is_sent_the_newest_and_all_that_changed(quick: None) -> None:
    source = Source()
    broadcast = Broadcast(source.make, lambda: source.numbers)
    stream = broadcast.stream()
    await anext(stream)
    await anext(stream)
    for name in ("tail", "steps"):
        source.numbers[name] += 1
        made = source.num_made
        await until(lambda made=made: source.num_made >= made + 2)
    status, changed = parsed(await anext(stream))
    assert json.loads(status["data"])["made"] >= source.num_made - 1
    assert changed["event"] == "changed"
    assert json.loads(changed["data"]) == ["tail", "steps"]
    only_status = parsed(await anext(stream))
    assert [event["event"] for event in only_status] == ["status"]
    await stream.aclose()


async def test_a_store_that_is_away_is_told_and_comes_back(quick: None) -> None:
    source = Source()
    broadcast = Broadcast(source.make, lambda: source.numbers)
    stream = broadcast.stream()
    await anext(stream)
    source.error = UnavailableError("Redis doesn't answer")
    kinds = [parsed(await anext(stream))[0]["event"] for _ in range(3)]
    assert kinds[-1] == "unavailable"
    source.error = None
    while parsed(await anext(stream))[0]["event"] != "status":
        pass
    await stream.aclose()


async def test_stop_ends_every_stream(quick: None) -> None:
    broadcast = Broadcast(Source().make, dict)
    streams = [broadcast.stream() for _ in range(10)]

    async def read(stream) -> int:
        return len([chunk async for chunk in stream])

    reading = [asyncio.create_task(read(stream)) for stream in streams]
    await asyncio.sleep(0.03)
    broadcast.stop()
    assert min(await asyncio.wait_for(asyncio.gather(*reading), 5)) >= 2
    assert [chunk async for chunk in broadcast.stream()] == [b"retry: 2000\n\n"]


async def test_a_status_that_can_not_be_made_ends_streams_and_the_next_begins_anew(
    quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    source = Source()
    broadcast = Broadcast(source.make, dict)
    source.error = RuntimeError("a fault")
    stream = broadcast.stream()
    assert [chunk async for chunk in stream] == [b"retry: 2000\n\n"]
    assert "no status can be made" in caplog.text
    source.error = None
    again = broadcast.stream()
    await anext(again)
    assert parsed(await anext(again))[0]["event"] == "status"
    await again.aclose()
    await asyncio.sleep(0)


async def test_a_listener_that_goes_is_forgotten(quick: None) -> None:
    broadcast = Broadcast(Source().make, dict)

    async def listen() -> None:
        async for _ in broadcast.stream():
            pass

    tasks = [asyncio.create_task(listen()) for _ in range(5)]
    await asyncio.sleep(0.03)
    assert broadcast.num_listening == 5
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0.01)
    assert broadcast.num_listening == 0
