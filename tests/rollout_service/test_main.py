"""The service as a process: how it listens, and with what it ends."""

import asyncio
import os
import signal
import socket
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from buffer.interface import SampleLease
from buffer.memory import MemoryBuffer
from protocol.errors import EngineError, UnavailableError
from protocol.settings import RunSettings
from rollout_service import main as service_main
from rollout_service.main import bind
from rollout_service.parts import check_parked
from tests.buffer.helpers import admit, start_one


async def test_answers_are_sent_at_once_and_not_when_the_client_has_acknowledged_their_headers(tmp_path):
    settings = RunSettings.model_validate({"run": {"dir": tmp_path}, "service": {"port": 0}})
    no_delay: list[int] = []

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        no_delay.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with bind(settings) as listener:
        async with await asyncio.start_server(answer, sock=listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            await reader.read()
            writer.close()
    assert no_delay[0]


async def _for_ever(*_: Any) -> None:
    await asyncio.Event().wait()


async def _nothing() -> None: ...


async def test_a_failure_is_known_before_the_parts_are_taken_apart(tmp_path, monkeypatch):
    failing, known = asyncio.Event(), []

    async def fail() -> None:
        raise EngineError("the engine broke")

    loop = SimpleNamespace(run=fail, watch=_for_ever, leases=None)
    parts = SimpleNamespace(loop=loop, sample_parts=None, redis=None, delivery=SimpleNamespace(stop=_nothing))

    @asynccontextmanager
    async def open_parts(_settings):
        try:
            yield parts
        finally:
            known.append(failing.is_set())

    host: Any = SimpleNamespace(
        settings=RunSettings.model_validate({"run": {"dir": tmp_path}}),
        started=lambda parts: None,
        stopping=lambda: None,
        running=SimpleNamespace(board=SimpleNamespace(keep_waits=_for_ever, close=_nothing)),
    )
    monkeypatch.setattr(service_main, "open_parts", open_parts)
    for name in ("show_progress", "renew_leases"):
        monkeypatch.setattr(service_main, name, _for_ever)
    with pytest.RaisesGroup(EngineError):
        await service_main._work(host, None, failing)
    assert known == [True]


async def test_a_signal_while_a_failure_is_under_way_hides_and_hastens_nothing(tmp_path, monkeypatch):
    parked = False

    async def work(host: Any, tracing: Any, failing: asyncio.Event) -> None:
        nonlocal parked
        failing.set()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        parked = True
        raise UnavailableError("Redis was given up")

    monkeypatch.setattr(service_main, "_work", work)
    settings = RunSettings.model_validate({"run": {"dir": tmp_path}, "service": {"port": 0}})
    with bind(settings) as listener, pytest.raises(UnavailableError, match="Redis was given up"):
        await service_main._serve(settings, listener, None)
    assert parked


async def test_a_service_that_could_not_park_says_so_when_it_ends(monkeypatch):
    buffer, cancelled = MemoryBuffer(), asyncio.CancelledError()
    epoch = await buffer.claim_service("one")
    (group,) = await admit(buffer)
    lease = await start_one(buffer, group.samples[0].sample_id)
    await start_one(buffer, group.samples[1].sample_id)  # no engine was given it: it loses nothing
    ran: list[SampleLease] = []

    async def check(error: BaseException, service_epoch: int = epoch) -> None:
        await check_parked(buffer, lambda: ran, service_epoch, None, error, None)

    await check(cancelled)
    ran.append(lease)
    with pytest.raises(UnavailableError, match=r"samples that are not parked \(1\)"):
        await check(cancelled)
    await check(EngineError("this says why"))
    await check(cancelled, epoch - 1)  # they are its successor's
    await buffer.park(lease, None)
    await check(cancelled)

    async def away() -> None:
        raise UnavailableError("Redis doesn't answer")

    monkeypatch.setattr(buffer, "snapshot", away)
    with pytest.raises(UnavailableError, match="can't tell whether all was parked: Redis doesn't answer"):
        await check(cancelled)
