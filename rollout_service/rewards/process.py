"""One scorer process as the service sees it.

Always true: a `WorkerProcess` runs at most one task; after anything but a whole reply it is out of step, and its owner
kills it. Killing takes the process group, so that what the scorer started ends with it.
"""

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import asdict, dataclass
from typing import Any

from protocol.errors import DataError
from protocol.samples import Json
from rollout_service.rewards.frames import FrameError, encode_frame, read_reply
from rollout_service.rewards.interface import ScoringTask

WORKER_MODULE = "rollout_service.rewards.worker"
LOAD_TIMEOUT_S = 120.0  # importing a scorer's libraries on a busy machine; what takes longer hangs


class WorkerDiedError(Exception):
    """The worker ended, or broke its protocol, before it had replied."""


class WorkerTimeoutError(Exception):
    """The task took longer than it may."""


@dataclass(frozen=True, slots=True)
class ScorerConfig:
    """Which scorer a worker loads: `reward.name` and `reward.settings`."""

    name: str
    settings: dict[str, Any]

    def setup(self) -> dict[str, Any]:
        """First frame of a worker; it can import what this process can."""
        return {"name": self.name, "settings": self.settings, "sys_path": [path for path in sys.path if path]}


def worker_command() -> list[str]:
    """Command line of a worker."""
    return [sys.executable, "-m", WORKER_MODULE]


def kill_group(pid: int) -> None:
    """End a worker, which leads a process group of its own, and all that it started."""
    with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
        os.killpg(pid, signal.SIGKILL)


class WorkerProcess:
    """A started worker whose scorer is loaded."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout

    @classmethod
    async def spawn(cls, config: ScorerConfig) -> "WorkerProcess":
        """Start a worker and wait until its scorer is loaded. Raises DataError if it can't be."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *worker_command(), stdin=pipe, stdout=pipe, start_new_session=True
        )
        worker = cls(process)
        try:
            reply = await worker._load(config)
        except BaseException:
            await worker.kill()
            raise
        if "error" in reply:
            await worker.kill()
            raise DataError(reply["error"])
        return worker

    @property
    def pid(self) -> int:
        """Process id, which is the id of its group too."""
        return self._process.pid

    async def score(self, task: ScoringTask, timeout_s: float) -> dict[str, Json]:
        """The worker's reply. Raises WorkerTimeoutError or WorkerDiedError; the worker is then of no more use."""
        await self._ask(asdict(task), LOAD_TIMEOUT_S)
        return await self._reply(timeout_s)

    async def kill(self) -> None:
        """End the worker and wait for its end."""
        if self._process.returncode is None:
            kill_group(self.pid)
        await self._process.wait()
        self._stdin.close()

    async def _load(self, config: ScorerConfig) -> dict[str, Json]:
        try:
            return await self._ask(config.setup(), LOAD_TIMEOUT_S)
        except WorkerTimeoutError as error:
            raise DataError(f"reward.name = {config.name!r} did not load within {LOAD_TIMEOUT_S:g} s") from error
        except WorkerDiedError as error:
            raise DataError(f"reward.name = {config.name!r} can't be loaded: {error}") from error

    async def _ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Json]:
        try:
            self._stdin.write(encode_frame(message))
            async with asyncio.timeout(timeout_s):
                await self._stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise WorkerDiedError(await self._describe_end()) from error
        except TimeoutError as error:
            raise WorkerTimeoutError from error
        return await self._reply(timeout_s)

    async def _reply(self, timeout_s: float) -> dict[str, Json]:
        try:
            async with asyncio.timeout(timeout_s):
                return await read_reply(self._stdout)
        except (asyncio.IncompleteReadError, FrameError) as error:
            raise WorkerDiedError(await self._describe_end()) from error
        except TimeoutError as error:
            raise WorkerTimeoutError from error

    async def _describe_end(self) -> str:
        """How the worker ended; one that closed its pipe but lives on is ended here."""
        try:
            async with asyncio.timeout(1.0):  # an exit is known a moment after the pipe has closed
                code = await self._process.wait()
        except TimeoutError:
            return "the scorer's process broke its protocol"
        if code < 0:
            return f"the scorer's process was ended by {signal.Signals(-code).name}"
        return f"the scorer's process exited with code {code}"
