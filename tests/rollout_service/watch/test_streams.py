"""A thousand pages that listen to one service, over real sockets."""

import asyncio
import json
import resource
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

NUM_STREAMS = 1000
MAX_GROWTH = 200 << 20  # bytes, of all streams
REQUEST = b"GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
ROOT = Path(__file__).parents[3]


class Service:
    """The process and its port."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port
        self.ps = psutil.Process(process.pid)
        self._writers: list[asyncio.StreamWriter] = []

    async def listen(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream whose first status has come."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        writer.write(REQUEST)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head
        assert b"text/event-stream" in head
        await reader.readuntil(b"event: status")
        return reader, writer

    async def hang_up(self) -> None:
        """Close every stream."""
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.transport.abort()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)

    async def stop(self) -> tuple[int, bytes]:
        """End it in order; its exit code and its last words."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        out, _ = await asyncio.wait_for(self.process.communicate(), 60)
        return self.process.returncode or 0, out


@asynccontextmanager
async def service_process(folder: Path) -> AsyncIterator[Service]:
    words = ("-m", "tests.rollout_service.watch.stream_service", str(folder))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdin=pipe, stdout=pipe, cwd=ROOT)
    assert process.stdout is not None
    service = Service(process, int(await process.stdout.readline()))
    try:
        yield service
    finally:
        await service.hang_up()
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.fixture
def many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * NUM_STREAMS:
        pytest.skip(f"this machine allows {hard} open files, the test wants {2 * NUM_STREAMS}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * NUM_STREAMS), hard))


async def events_of(reader: asyncio.StreamReader, seconds: float) -> list[bytes]:
    """What comes in a time."""
    got = bytearray()
    with_deadline = asyncio.get_running_loop().time() + seconds
    while (left := with_deadline - asyncio.get_running_loop().time()) > 0:
        try:
            got += await asyncio.wait_for(reader.read(1 << 16), left)
        except TimeoutError:
            break
    return bytes(got).split(b"\n\n")


async def test_a_thousand_streams_cost_little(
    tmp_path: Path, many_files: None, capsys: pytest.CaptureFixture[str]
) -> None:
    async with service_process(tmp_path) as service:
        for _ in range(20):  # what is loaded and cached on first use
            await service.listen()
        await service.hang_up()
        before = service.ps.memory_info().rss
        streams = []
        for _ in range(NUM_STREAMS // 50):
            streams += await asyncio.gather(*(service.listen() for _ in range(50)))
        began_s, cpu = time.monotonic(), sum(service.ps.cpu_times()[:2])
        watched, *others = streams
        for reader, _ in others:  # nobody reads: what comes is dropped, as a page in a hidden tab does
            reader._transport.pause_reading()
        got = await events_of(watched[0], 5.0)
        took_s = time.monotonic() - began_s
        growth = service.ps.memory_info().rss - before
        cpu = (sum(service.ps.cpu_times()[:2]) - cpu) / took_s
        statuses = [part for part in got if b"event: status" in part]
        with capsys.disabled():
            print(
                f"\n  {NUM_STREAMS} streams: {growth / 2**20:.0f} MiB, {len(statuses)} events in {took_s:.1f} s, "
                f"{cpu:.0%} of a core"
            )
        assert growth < MAX_GROWTH
        made_s = [json.loads(part.split(b"data: ")[1].split(b"\r\n")[0])["uptime_s"] for part in statuses]
        assert len(made_s) > 1
        gaps = [later - earlier for earlier, later in pairwise(made_s)]
        assert min(gaps) > 0.9, "one a second, however many samples run and pages listen"
        await service.hang_up()
        assert service.process.returncode is None


async def test_streams_of_a_service_that_stops_end(tmp_path: Path) -> None:
    async with service_process(tmp_path) as service:
        streams = [await service.listen() for _ in range(20)]
        code, out = await service.stop()
        assert code == 0
        assert b"ended in order" in out
        for reader, _ in streams:
            rest = await reader.read()
            assert rest.endswith(b"0\r\n\r\n"), "the last chunk of a response that is whole"


async def test_pages_are_told_which_pictures_changed(tmp_path: Path) -> None:
    async with service_process(tmp_path) as service:
        reader, _ = await service.listen()
        changed: set[str] = set()
        while not changed >= {"timeline", "tail", "moments"}:
            part = (await reader.readuntil(b"\n\n")).decode()
            if "event: changed" in part:
                changed |= set(json.loads(part.split("data: ")[1]))
