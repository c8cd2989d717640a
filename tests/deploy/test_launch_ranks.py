"""Ranks as child processes: places, exit codes, signals."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.launch_ranks import hostfile_command, launch, run_ranks
from protocol.errors import SettingsError

ROOT = Path(__file__).parents[2]


def python(code: str, *words: str) -> list[str]:
    return [sys.executable, "-c", code, *words]


def test_each_rank_knows_its_place(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    code = (
        "import json, os, pathlib, sys; "
        f"pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(json.dumps({{n: os.environ[n] for n in {names}}}))"
    )
    assert run_ranks([python(code, str(tmp_path))] * 3) == 0
    places = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert [p["RANK"] for p in places] == [p["LOCAL_RANK"] for p in places] == ["0", "1", "2"]
    assert {p["WORLD_SIZE"] for p in places} == {"3"}
    assert len({p["MASTER_PORT"] for p in places}) == 1


def test_a_rank_that_fails_ends_the_others_and_gives_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.launch_ranks.ORPHAN_PATIENCE_S", 0.0)
    waits = "import time; time.sleep(3600)"
    assert run_ranks([python(waits), python("import sys; sys.exit(3)")]) == 3
    assert run_ranks([python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), python(waits)]) == 128 + 9


def test_a_rank_that_ends_well_does_not_hurry_the_others() -> None:
    assert run_ranks([python("pass"), python("import time; time.sleep(0.5)")]) == 0


def test_sigterm_reaches_every_rank_once_and_they_end_in_their_own_time(tmp_path: Path) -> None:
    rank = (
        "import os, pathlib, signal, sys, time\n"
        "mine = pathlib.Path(sys.argv[1], os.environ['RANK'])\n"
        "count = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: count.append(1))\n"
        "mine.with_suffix('.ready').touch()\n"
        "while not count: time.sleep(0.01)\n"
        "time.sleep(0.3)\n"
        "mine.write_text(str(len(count)))\n"
    )
    launcher = (
        "import sys; from deploy.launch_ranks import run_ranks; "
        "sys.exit(run_ranks([[sys.executable, '-c', sys.argv[1], sys.argv[2]]] * 2))"
    )
    process = subprocess.Popen(python(launcher, rank, str(tmp_path)), cwd=ROOT)
    while len(list(tmp_path.glob("*.ready"))) < 2:
        assert process.poll() is None
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 0
    assert [(tmp_path / str(r)).read_text() for r in range(2)] == ["1", "1"]


def test_a_hostfile_is_handed_to_deepspeed(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    with pytest.raises(SettingsError, match="does not exist"):
        launch(1, hostfile, Path("run.toml"), [])
    hostfile.write_text("one slots=8\ntwo slots=8\n")
    command = hostfile_command(hostfile, 1, ["run.toml", "--run.seed=1"])
    assert command[1:5] == ["-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile)]
    assert command[-4:] == ["--module", "trainer", "run.toml", "--run.seed=1"]
    assert hostfile_command(hostfile, 4, ["run.toml"])[5:7] == ["--num_gpus", "4"]
