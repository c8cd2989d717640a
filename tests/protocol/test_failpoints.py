"""Failpoints: nothing unless the environment names one, and then exactly what it says, once."""

import os
import signal
import subprocess
import sys
import time

import pytest

from protocol.errors import SettingsError
from protocol.failpoints import EXIT_CODE, VARIABLE, Failpoint, failpoint, parse

PASS_TWICE = """
from protocol.failpoints import Failpoint, failpoint
for passage in (1, 2):
    failpoint(Failpoint.MID_STEP)
    failpoint(Failpoint.AFTER_ACK)
    print(passage, flush=True)
"""


def start(armed: str) -> subprocess.Popen[str]:
    environment = os.environ | {VARIABLE: armed}
    return subprocess.Popen([sys.executable, "-c", PASS_TWICE], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("armed", "code", "passed"),
    [
        ("", 0, "1\n2\n"),
        ("mid_cut=kill", 0, "1\n2\n"),
        ("mid_step=kill", -signal.SIGKILL, ""),
        ("mid_step=exit@2", EXIT_CODE, "1\n"),
        ("after_ack=kill@2", -signal.SIGKILL, "1\n"),
        ("mid_step=kill@3", 0, "1\n2\n"),
    ],
)
def test_a_process_fails_at_the_place_and_passage_that_is_named(armed, code, passed):
    process = start(armed)
    assert process.communicate()[0] == passed
    assert process.returncode == code


def test_a_stopped_process_goes_on_when_it_is_told_to():
    process = start("mid_step=stop@2")
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    assert os.waitpid(process.pid, os.WUNTRACED)[1] == 0x7F | signal.SIGSTOP << 8
    process.send_signal(signal.SIGCONT)
    assert process.stdout.read() == "2\n"
    process.stdout.close()
    assert process.wait() == 0


@pytest.mark.parametrize(
    "text",
    ["mid_step", "mid_step=", "mid_step=crash", "nowhere=kill", "mid_step=kill@0", "mid_step=kill@soon", "=kill"],
)
def test_a_wrong_name_is_refused_with_those_there_are(text):
    with pytest.raises(SettingsError, match=r"places: after_lease, .*after_spool; actions: kill, stop, exit"):
        parse(text)


def test_a_wrong_name_ends_the_command_with_one_sentence():
    command = [sys.executable, "-c", "import protocol.failpoints"]
    done = subprocess.run(command, env=os.environ | {VARIABLE: "x=y"}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "APRIL_FAILPOINT=x=y is not PLACE=ACTION" in done.stderr


def test_a_place_that_is_not_named_costs_next_to_nothing():
    def seconds(work) -> float:
        began = time.perf_counter()
        for _ in range(100_000):
            work()
        return time.perf_counter() - began

    table: dict[Failpoint, int] = {}
    lookup = min(seconds(lambda: table.get(Failpoint.MID_STEP)) for _ in range(3))
    assert min(seconds(lambda: failpoint(Failpoint.MID_STEP)) for _ in range(3)) < 10 * lookup
