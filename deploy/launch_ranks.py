"""Ranks of the trainer: children of this process on one machine, or DeepSpeed's launcher over several.

Always true: a request to stop (SIGTERM, Ctrl-C) reaches every rank, and they have all the time they need to finish the
step and save it; when one rank ends with an error the others, which would wait for it for ever, are ended; the exit
code is that of the first rank that failed, or 0.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from protocol.errors import SettingsError

LOOK_EVERY_S = 0.2  # between two looks at the ranks
ORPHAN_PATIENCE_S = 10.0  # for ranks to notice by themselves that another has failed, and to say so


def launch(nproc: int, hostfile: Path | None, run_toml: Path, overrides: Sequence[str]) -> int:
    """Run the trainer on `nproc` ranks here, or on those that `hostfile` names; returns the exit code."""
    words = [str(run_toml), *overrides]
    if hostfile is None:
        return run_ranks([[sys.executable, "-m", "trainer", *words]] * nproc)
    return _wait([subprocess.Popen(hostfile_command(hostfile, nproc, words))])  # noqa: S603  our own command line


def hostfile_command(hostfile: Path, nproc: int, words: Sequence[str]) -> list[str]:
    """The command line of DeepSpeed's launcher; `nproc` above 1 bounds the ranks on each machine."""
    if not hostfile.is_file():
        raise SettingsError(f"{hostfile} does not exist; name a file with lines such as `worker-1 slots=8`")
    bound = ["--num_gpus", str(nproc)] if nproc > 1 else []
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile), *bound]
    return [*launcher, "--module", "trainer", *words]


def run_ranks(commands: Sequence[Sequence[str]]) -> int:
    """Run one command for each rank of this machine; returns the first exit code that is not 0, else 0."""
    shared = {"WORLD_SIZE": str(len(commands)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, command in enumerate(commands):
            place = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            # A session of its own: a terminal's Ctrl-C must reach each rank once, by the hand of this process.
            ranks.append(subprocess.Popen(command, env=os.environ | place, start_new_session=True))  # noqa: S603
        return _wait(ranks)
    finally:
        _end(ranks)


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Until all have ended, or one with an error and then, after some patience, the others by our hand."""
    failed: int | None = None
    give_up_at: float | None = None
    with _passing_signals_on(ranks):
        while None in (codes := [rank.poll() for rank in ranks]):
            failures = [code for code in codes if code]
            if failures and give_up_at is None:
                failed, give_up_at = failures[0], time.monotonic() + ORPHAN_PATIENCE_S
            if give_up_at is not None and time.monotonic() > give_up_at:
                _end(ranks)
            time.sleep(LOOK_EVERY_S)
    code = failed if failed is not None else next((r.returncode for r in ranks if r.returncode), 0)
    return code if code >= 0 else 128 - code


@contextmanager
def _passing_signals_on(ranks: Sequence[subprocess.Popen[bytes]]) -> Generator[None]:
    def pass_on(number: int, _: FrameType | None) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    old = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    for rank in ranks:
        rank.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
