"""What the demo says of where to look, where its parts find each other, and how a signal ends them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.demo import launch
from protocol.errors import SettingsError
from protocol.settings import RunSettings, load_settings


def _notes(capsys: pytest.CaptureFixture[str], **service: object) -> list[dict[str, str]]:
    settings = RunSettings(service=service, trainer={"service_url": "http://127.0.0.1:4711"})
    launch._tell_address(settings)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_address_of_the_page_is_a_note_that_programs_can_read(capsys: pytest.CaptureFixture[str]) -> None:
    page, top = _notes(capsys)
    assert page["event"] == "note"
    assert page["url"] == "http://127.0.0.1:4711/dashboard"
    assert page["url"] in page["text"]
    assert "april top http://127.0.0.1:4711" in top["text"]


def test_a_path_prefix_and_a_page_that_is_off_are_minded(capsys: pytest.CaptureFixture[str]) -> None:
    assert _notes(capsys, root_path="/april")[0]["url"] == "http://127.0.0.1:4711/april/dashboard"
    (top,) = _notes(capsys, dashboard=False)
    assert "dashboard" not in top["text"]


TOML = Path(launch.__file__).with_name("demo.toml")


@pytest.mark.parametrize(
    ("words", "url"),
    [
        ([], "http://127.0.0.1:4711"),
        (["--service.port=4712"], "http://127.0.0.1:4712"),
        (["--service.host=0.0.0.0", "--service.token=secret"], "http://127.0.0.1:4711"),
        (["--service.host=::1", "--service.port=4712"], "http://[::1]:4712"),
        (["--service.port=4712", "--trainer.service_url=http://proxy:1"], "http://proxy:1"),
    ],
)
def test_the_trainer_finds_the_service_wherever_it_is_put(words: list[str], url: str) -> None:
    wired = ["--service.port=4711", "--trainer.service_url=http://127.0.0.1:4711", *words]
    assert load_settings(TOML, launch.following(wired, TOML, words)).trainer.service_url == url


def test_a_port_that_nobody_is_told_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"service\.port = 0 tells the trainer no port: leave it out"):
        launch.following(["--service.port=0"], TOML, ["--service.port=0"])


LAUNCHER = """
import sys
from pathlib import Path
from types import SimpleNamespace

from deploy.console import run_reporting_errors
from deploy.demo import launch

# Making a policy takes a minute and has no part in this.
policy = SimpleNamespace(default_cache_dir=Path, make_base_policy=lambda *_: Path("policy"))
sys.modules["deploy.demo.base_policy"] = policy
sys.executable = sys.argv[1]  # what stands for the service and the trainer
run_reporting_errors(lambda: launch.run_demo(Path(sys.argv[2]), [], None))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_running(tmp_path: Path, number: signal.Signals) -> None:
    child = tmp_path / "child"
    # It takes a moment to end, so that the repeated signals below meet the launcher while it waits.
    child.write_text(f"#!/bin/sh\ntrap 'sleep 0.5; echo $2 >> {tmp_path}/ended; exit' TERM\n"
                     f"echo $$ >> {tmp_path}/pids\nwhile :; do sleep 0.05; done\n")  # fmt: skip
    child.chmod(0o755)
    command = [sys.executable, "-c", LAUNCHER, str(child), str(tmp_path / "run")]
    with subprocess.Popen(command, cwd=Path(__file__).parents[3], stdout=subprocess.DEVNULL) as launcher:
        try:
            server = tmp_path / "run" / "redis" / "server.json"
            _until(lambda: len(_lines(tmp_path / "pids")) == 2)
            pids = [*map(int, _lines(tmp_path / "pids")), json.loads(server.read_text())["pid"]]
            for _ in range(3):
                launcher.send_signal(number)
                time.sleep(0.1)
            code = launcher.wait(30)
        finally:
            launcher.kill()
    assert code == (1 if number == signal.SIGINT else 128 + number)
    assert len(_lines(tmp_path / "ended")) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
