"""The simulated engine with a process of its own behind it, which can be killed and stopped as a real engine's can.

Always true: it decodes only while its process answers: a beat goes through the process and back, and when that ends the
engine dies as vLLM does, with `EngineDeadError` for everything that runs; while the process is stopped, no token is
written. The process ends with this one, at the end of its input.
"""

import asyncio
from pathlib import Path
from typing import Any

from protocol.errors import EngineDeadError
from protocol.settings import RunSettings
from rollout_service.engines.simulated import SimulatedEngine
from tests.support.flight import FlightRecorder

BEAT_S = 0.02  # how late a death is noticed at the most; vLLM's is noticed within 0.2 s
LATE_S = 0.1  # a process that does not answer for so long is taken for stopped; a busy machine delays it as well
CORE_COMMAND = ("cat",)


class MortalEngine(SimulatedEngine):
    """A replica whose `process_ids` mean something."""

    def __init__(self, settings: RunSettings, worker: str, flight: FlightRecorder) -> None:
        super().__init__(settings, worker)
        self._flight = flight
        self._core: asyncio.subprocess.Process | None = None
        self._beating: asyncio.Task[None] | None = None

    @property
    def process_ids(self) -> list[int]:
        """Id of the process that it dies with."""
        return [self._core.pid] if self._core is not None else []

    async def start(self) -> None:
        """See `SimulatedEngine.start`."""
        await super().start()
        await self._start_core()

    async def restart(self, path: Path | None, version: int) -> None:
        """See `SimulatedEngine.restart`."""
        await self._end_core()
        await super().restart(path, version)
        await self._start_core()

    async def close(self) -> None:
        """See `SimulatedEngine.close`."""
        await self._end_core()
        await super().close()

    async def _start_core(self) -> None:
        pipe = asyncio.subprocess.PIPE
        self._core = await asyncio.create_subprocess_exec(*CORE_COMMAND, stdin=pipe, stdout=pipe)
        self._beating = asyncio.create_task(self._beat(self._core), name=f"beat-{self.worker}")

    async def _end_core(self) -> None:
        beating, self._beating = self._beating, None
        core, self._core = self._core, None
        if beating is not None:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
        if core is not None:
            if core.returncode is None:
                core.kill()
            await core.wait()
            if core.stdin is not None:
                core.stdin.close()

    async def _beat(self, core: asyncio.subprocess.Process) -> None:
        assert core.stdin is not None
        assert core.stdout is not None
        try:
            while True:
                core.stdin.write(b".")
                await core.stdin.drain()
                await self._answer(core.stdout)
                await asyncio.sleep(BEAT_S)
        except (asyncio.IncompleteReadError, ConnectionError, EngineDeadError):
            self.die()

    async def _answer(self, stdout: asyncio.StreamReader) -> None:
        answer = asyncio.ensure_future(stdout.readexactly(1))
        try:
            await asyncio.wait({answer}, timeout=LATE_S)
            if not answer.done():
                await self.hold()
                try:
                    await answer
                finally:
                    await self.release()
            await answer
        finally:
            answer.cancel()

    def _write(self, sequence: Any, count: int) -> None:
        super()._write(sequence, count)
        sample, _, attempt = sequence.request.request_id.partition("@")
        if attempt.isdecimal():
            self._flight.set(sample, int(attempt), generated=sequence.position)
