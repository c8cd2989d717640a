"""An engine that is no longer wanted while it starts."""

import asyncio
import threading
from typing import Any

import pytest

from protocol.errors import EngineError
from protocol.settings import RunSettings
from rollout_service.engines.vllm_process import VllmProcess


class Start:
    """In place of vLLM's start: takes as long as the test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.num_stopped = 0
        monkeypatch.setattr(VllmProcess, "_start", self._start)
        monkeypatch.setattr(VllmProcess, "stop", self._stop)

    def _start(self, settings: RunSettings, worker: str, seed: int, started: list[Any]) -> None:
        self.begun.set()
        assert self.go_on.wait(60)
        if self.error:
            raise self.error
        started.append(VllmProcess(None, worker, True, None))  # pyright: ignore[reportArgumentType]

    async def _stop(self) -> None:
        self.num_stopped += 1


async def cancelled(start: Start, times: int) -> asyncio.Task[VllmProcess]:
    task = asyncio.create_task(VllmProcess.start(RunSettings(), "w", 0))
    await asyncio.to_thread(start.begun.wait, 60)
    for _ in range(times):
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done(), "what vLLM starts must be let go first"
    start.go_on.set()
    await asyncio.wait({task})
    return task


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_is_stopped_however_often_it_is_cancelled(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    start = Start(monkeypatch)
    task = await cancelled(start, times)
    assert task.cancelled()
    assert start.num_stopped == 1


async def test_that_fails_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    start = Start(monkeypatch)
    start.error = EngineError("no memory")
    task = await cancelled(start, 1)
    assert task.cancelled()
    assert start.num_stopped == 0
    assert "an engine that was no longer wanted did not start: no memory" in caplog.text
