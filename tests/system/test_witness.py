"""What the chaos run leans on: an engine with a process that can be killed, and what outlives a killed service."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protocol.errors import EngineDeadError
from rollout_service.engines.interface import Chunk
from tests.support.children import children_of, resident_bytes
from tests.support.cluster import ENVIRONMENT, ROOT, Process
from tests.support.flight import FlightRecorder, read_flights
from tests.support.mortal_engine import CORE_COMMAND, MortalEngine
from tests.support.service import service_settings
from tests.support.simulated import request, until

NEVER_ENDS = 1_000_000  # tokens
RECORDS_AND_DIES = """
import os, signal, sys
from pathlib import Path
from tests.support.flight import FlightRecorder
flight = FlightRecorder(Path(sys.argv[1]), os.getpid())
flight.begin("g000000001.000", 2, 10)
flight.begin("g000000002.000", 1, 0)
flight.set("g000000001.000", 2, received=17, pending_since=3.5)
flight.end("g000000002.000", 1)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[MortalEngine]:
    settings = service_settings(tmp_path, data={"max_response_length": NEVER_ENDS})
    engine = MortalEngine(settings, "engine-0", FlightRecorder(tmp_path, os.getpid()))
    engine._lengths = lambda sample: NEVER_ENDS
    await engine.start()
    yield engine
    await engine.close()


async def read_on(engine: MortalEngine, name: str, chunks: list[Chunk]) -> None:
    async for chunk in engine.generate(request(name, NEVER_ENDS)):
        chunks.append(chunk)


async def more_of(chunks: list[Chunk]) -> None:
    before = len(chunks)
    await until(lambda: len(chunks) > before)


async def test_an_engine_dies_with_its_process_and_comes_back_with_another(engine: MortalEngine) -> None:
    chunks: list[Chunk] = []
    reading = asyncio.create_task(read_on(engine, "a@1", chunks))
    await more_of(chunks)
    (pid,) = engine.process_ids
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        await reading
    assert not engine.stats().alive
    await engine.restart(None, 0)
    assert engine.process_ids != [pid]
    reading = asyncio.create_task(read_on(engine, "a@2", chunks))
    await more_of(chunks)
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading


async def test_an_engine_whose_process_is_stopped_writes_nothing_until_it_goes_on(engine: MortalEngine) -> None:
    chunks: list[Chunk] = []
    reading = asyncio.create_task(read_on(engine, "a@1", chunks))
    await more_of(chunks)
    (pid,) = engine.process_ids
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: engine._gate.is_closed)
    before = engine.stats().tokens_generated
    await asyncio.sleep(0.1)
    assert engine.stats().tokens_generated == before
    os.kill(pid, signal.SIGCONT)
    await more_of(chunks)
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading


def test_a_flight_recorder_outlives_a_killed_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RECORDS_AND_DIES, str(tmp_path)]
    child = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT})
    assert child.wait() == -signal.SIGKILL
    (record,) = read_flights(tmp_path)
    assert (record["kind"], record["pid"]) == ("flight", child.pid)
    (row,) = record["rows"]
    assert (row["sample"], row["attempt"]) == ("g000000001.000", 2)
    assert (row["stored"], row["received"], row["pending_since"]) == (10, 17, 3.5)


def test_children_of_a_process_are_found_by_their_command(tmp_path: Path) -> None:
    words = (
        "import subprocess; p = subprocess.Popen(['cat'], stdin=subprocess.PIPE); print(p.pid, flush=True); p.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    process = Process("parent", parent, tmp_path / "log")
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        assert children_of(process, CORE_COMMAND) == [pid]
        assert children_of(process, ("another command",)) == []
        assert resident_bytes(parent.pid) > 1 << 20
    finally:
        process.kill()
        parent.stdout.close()
    assert children_of(process, CORE_COMMAND) == []
