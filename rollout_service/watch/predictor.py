"""Predictions for the ratio's picture, made in a process of their own when somebody looks at it.

Always true: at most one job is done at a time, and a new one begins EVERY_S after the one before at the earliest, or
when the settings it depends on have changed; nobody waits for it: the picture says how old its prediction is.
"""

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from protocol.errors import DataError
from protocol.watching import Predicted
from rollout_service.watch.observed import Choices

log = logging.getLogger(__name__)

EVERY_S = 300.0  # lengths change over tens of rounds
TIMEOUT_S = 120.0  # seconds of work at the lowest priority on a machine that is busy
MakeJob = Callable[[], dict[str, Any]]


class Predictor:
    """The last prediction, and the job that makes the next one."""

    def __init__(self) -> None:
        self.predicted: list[Predicted] = []
        self.recommended: float | None = None
        self.reason: str | None = None
        self.num_changes = 0
        self._note = "the simulator has not run yet: look again in some seconds"
        self._made_s: float | None = None
        self._tried_s: float | None = None
        self._choices: Choices | None = None
        self._task: asyncio.Task[None] | None = None

    def note(self) -> str | None:
        """Why there is no prediction, or how old it is; None for one that is fresh."""
        if self._made_s is None:
            return self._note
        age_s = time.monotonic() - self._made_s
        return f"predicted {age_s / 60:.0f} minutes ago" if age_s > EVERY_S else None

    def wanted(self, choices: Choices, make_job: MakeJob) -> None:
        """Somebody looks: begin a job if it is time. `make_job` is called in a thread."""
        now_s = time.monotonic()
        same = self._choices is not None and _depends_on(choices) == _depends_on(self._choices)
        if self._task is not None or (self._tried_s is not None and same and now_s - self._tried_s < self._pause_s()):
            return
        self._tried_s, self._choices = now_s, choices
        self._task = asyncio.create_task(self._predict(make_job), name="predict")
        self._task.add_done_callback(self._done)

    async def settled(self) -> None:
        """Wait for the job that is being done, if there is one."""
        task = self._task
        if task is not None:
            await asyncio.wait({task})

    async def close(self) -> None:
        """End the job."""
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _pause_s(self) -> float:
        """What failed for want of data is tried again sooner."""
        return EVERY_S if self._made_s is not None else EVERY_S / 30

    def _done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()):
            log.warning("the ratio's prediction failed: %s", error)
            self._note = f"the simulator failed: {error}"
        self.num_changes += 1

    async def _predict(self, make_job: MakeJob) -> None:
        try:
            job = await asyncio.to_thread(make_job)
            answer = await self._run(json.dumps(job).encode())
        except DataError as error:
            self._note = str(error)
            return
        except TimeoutError:
            self._note = f"the simulator did not finish within {TIMEOUT_S:g} s: the machine is busy"
            return
        if "error" in answer:
            self._note = answer["error"]
            return
        self.predicted = [Predicted(**row) for row in answer["predicted"]]
        self.recommended, self.reason = answer["recommended"], answer["reason"] or answer["note"]
        self._made_s = time.monotonic()

    async def _run(self, job: bytes) -> dict[str, Any]:
        pipe = asyncio.subprocess.PIPE
        words = (sys.executable, "-m", "rollout_service.watch.forecast_worker")
        # In a session of its own: Ctrl-C at the terminal is the service's to handle.
        process = await asyncio.create_subprocess_exec(
            *words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                out, err = await process.communicate(job)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode:
            raise DataError(f"the simulator failed: {err.decode(errors='replace').strip().splitlines()[-1:]}")
        return json.loads(out)


def _depends_on(choices: Choices) -> tuple[float, ...]:
    return (choices.ratio, choices.lookahead, choices.max_lag)
