"""How the benchmark and a contestant's process speak: a line `step` in, a JSON line with what it took out.

Always true: contestants take turns, so that whatever else the machine does hits all of them alike; each has a process
of its own, so that its peak memory is its own, and libraries that fight over process groups don't meet.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.trainer_parts.memory import PeakMemory
from benchmarks.trainer_parts.workload import Workload

STEP = "step"


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step: time by the clock and on the processor, memory, and numbers that must agree."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    above_bytes: int
    loss: float
    grad_norm: float


class Channel:
    """A contestant's side."""

    def __init__(self) -> None:
        # Libraries print: the answers get a descriptor of their own, and prints go to standard error.
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._memory = PeakMemory()
        self._began = self._began_cpu = 0.0

    def wait(self) -> bool:
        """Whether another step is wanted; the clock starts then."""
        if sys.stdin.readline().strip() != STEP:
            return False
        self._memory.start()
        self._began, self._began_cpu = time.perf_counter(), time.process_time()
        return True

    def answer(self, loss: float, grad_norm: float) -> None:
        """The step is done."""
        seconds, cpu_seconds = time.perf_counter() - self._began, time.process_time() - self._began_cpu
        result = StepResult(seconds, cpu_seconds, self._memory.peak(), self._memory.above(), loss, grad_norm)
        print(json.dumps(asdict(result)), file=self._answers, flush=True)


class Contestant:
    """The benchmark's side of one process."""

    def __init__(self, process: "subprocess.Popen[str]", name: str) -> None:
        self.name = name
        self._process = process
        assert process.stdout is not None, "it is a pipe"
        self._answers = process.stdout

    def step(self) -> StepResult:
        """Let it make one step and wait for that."""
        print(STEP, file=self._process.stdin, flush=True)
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self._process.wait()}; its last words are above")
        return StepResult(**json.loads(line))


@contextmanager
def contestant(name: str, work: Workload, model_dir: Path, **options: Any) -> Generator[Contestant]:
    """The process `name` of `benchmarks.trainer_parts`: `ours` or `trl_step`."""
    words = json.dumps({"work": work.as_dict(), "model_dir": str(model_dir), **options})
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.trainer_parts.{name}", words]
    environment = os.environ | {"OMP_NUM_THREADS": str(work.threads), "OMP_WAIT_POLICY": "passive"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield Contestant(process, name)
    finally:
        process.communicate()  # closes both pipes: without another line the contestant ends
