"""`april top` in a terminal of its own: drawn, resized, told by keys, and left as it was."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.watched import FakeService, fake_service

PATIENCE_S = 60.0
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>()][A-Z0-9]?")


class Terminal:
    """A process on a pseudo-terminal, and all it has written."""

    def __init__(self, words: list[str], columns: int, rows: int) -> None:
        self._master, slave = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        env = os.environ | {"TERM": "xterm-256color", "PYTHONPATH": str(Path(__file__).parents[2])}
        env = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}
        command = [sys.executable, "-m", "deploy.cli", "top", *words]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True
        )
        self.output = ""

    def resize(self, columns: int, rows: int) -> None:
        """The window has another size now."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, key: str) -> None:
        """Type."""
        os.write(self._master, key.encode())

    def until(self, *words: str) -> str:
        """Read until all of `words` were shown since the last call; what was shown."""
        deadline, seen = time.monotonic() + PATIENCE_S, ""
        while not all(word in ANSI.sub("", seen) for word in words):
            assert time.monotonic() < deadline, f"{words} not shown, but:\n{ANSI.sub('', seen)}"
            if select.select([self._master], [], [], 0.1)[0]:
                seen += os.read(self._master, 65536).decode(errors="replace")
        self.output += seen
        return ANSI.sub("", seen)

    def close(self) -> None:
        """End it if it hasn't."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self.slave)


@pytest.fixture
def streaming() -> Iterator[str]:
    """A service whose event stream stays open and sends a status again and again."""
    with fake_service() as (handler, url):
        stop = threading.Event()

        def do_get(self: FakeService) -> None:
            if self.path != "/v1/events":
                FakeService.do_GET(self)
                return
            self.send_response(200)
            self.end_headers()
            while not stop.wait(0.05):
                self.wfile.write(f"event: status\ndata: {self.status.model_dump_json()}\n\n".encode())

        handler.do_GET = do_get  # type: ignore[method-assign]
        yield url
        stop.set()


@pytest.fixture
def terminal(streaming: str) -> Iterator[Terminal]:
    made = Terminal([streaming], 80, 24)
    yield made
    made.close()


def test_it_is_drawn_follows_the_window_and_leaves_on_q(terminal: Terminal) -> None:
    shown = terminal.until("The tail limits the run", "q quit")
    assert "reward 0.620" in shown
    terminal.resize(50, 8)
    terminal.process.send_signal(signal.SIGWINCH)
    small = terminal.until("april top", "q quit")
    last_screen = small[small.rindex("april top") :]
    assert all(len(line.rstrip("\r")) <= 50 for line in last_screen.split("\n"))
    terminal.press("p")
    terminal.until("start april top with --control")
    terminal.press("q")
    assert terminal.process.wait(PATIENCE_S) == 0
    assert termios.tcgetattr(terminal.slave) == terminal.before
    assert "\x1b[?1049h" in terminal.output, "it draws on the alternate screen"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_the_terminal_as_it_was(terminal: Terminal, number: signal.Signals) -> None:
    terminal.until("q quit")
    terminal.process.send_signal(number)
    assert terminal.process.wait(PATIENCE_S) == 0
    assert termios.tcgetattr(terminal.slave) == terminal.before
