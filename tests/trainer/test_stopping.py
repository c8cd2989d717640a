"""Requests to stop, in a process of their own."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Says "ready", then what it has after each line that it is sent; ends well when told to.
PROGRAM = """
import logging, sys
from trainer import stopping
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
stopping.REPEAT_GRACE_S = float(sys.argv[1])
with stopping.stop_requests() as stop:
    print("ready", flush=True)
    for line in sys.stdin:
        print("set" if stop.is_set() else "not set", flush=True)
"""


@pytest.fixture
def start():
    started: list[subprocess.Popen[str]] = []

    def make(grace_s: float) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(grace_s)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        assert heard(process) == "ready"
        return process

    yield make
    for process in started:
        process.kill()
        process.communicate()


def heard(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def told(process: "subprocess.Popen[str]") -> str:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return heard(process)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_request_is_ignored_and_the_third_ends_the_process(start, number: signal.Signals) -> None:
    process = start(600)
    process.send_signal(number)
    assert heard(process) == "asked to stop: the step is finished and saved first"
    process.send_signal(number)
    assert heard(process).startswith("already stopping: ")
    assert told(process) == "set"
    process.send_signal(number)
    assert process.wait(60) == -number


def test_a_second_request_that_comes_late_is_meant(start) -> None:
    process = start(-1)
    process.send_signal(signal.SIGTERM)
    assert "asked to stop" in heard(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM


def test_nobody_asked(start) -> None:
    process = start(600)
    assert told(process) == "not set"
    process.communicate()
    assert process.returncode == 0
