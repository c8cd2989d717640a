"""Children of a launcher: started with a log file each, watched, and ended by their own id.

Always true: whatever ends the launcher's block, every child that it started has ended before the block is left.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import AprilError

STOP_TIMEOUT_S = 60  # parking everything takes seconds; a child that needs longer hangs


class ChildError(AprilError):
    """A child process ended that should not have, or with an error."""


@dataclass(slots=True)
class Child:
    """One child process and where its output goes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def check_alive(self) -> None:
        """Raise ChildError with the end of its log if it has ended with an error."""
        code = self.process.poll()
        if code:
            raise ChildError(f"the {self.name} ended with exit code {code}; the end of {self.log}:\n{self.tail()}")

    def tail(self, lines: int = 15) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> int:
        """SIGTERM, then SIGKILL if it does not end; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()


@contextlib.contextmanager
def start_april(name: str, words: Sequence[str], log: Path, env: Mapping[str, str]) -> Generator[Child]:
    """Run `april WORDS` as a child of its own session; end it when the block is left."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(  # noqa: S603  our own command line
            [sys.executable, "-m", "deploy.cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **env},
            start_new_session=True,
        )
    child = Child(name, process, log)
    try:
        yield child
    finally:
        child.stop()
