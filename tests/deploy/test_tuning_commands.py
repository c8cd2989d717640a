"""The commands that tune, as a user calls them: reports, and sentences with exit code 2."""

import asyncio
import contextlib
import gzip
import json
import subprocess
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from deploy import tuning_progress
from deploy.cli import main
from deploy.tuning_progress import PlainLines
from rollout_service.tuning.engine_model import EngineModel
from rollout_service.tuning.trace_open import open_trace
from tests.support.service import running_service, service_settings

QUICK = ("--rounds", "40", "--processes", "1", "--groups", "4", "--samples", "2")
TAIL = "lognormal:median=40,sigma=1.2,max=800"
SHORT = "lognormal:median=40,sigma=0.01"


def april(*arguments: str | Path) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(main, [str(a) for a in arguments], env={"COLUMNS": "100"})


def lengths_file(tmp_path: Path, header: str = "TIMESTAMP,ContextTokens,GeneratedTokens") -> Path:
    """A CSV file like those of a serving log, with a tail."""
    file = tmp_path / "log.csv"
    rows = [f"t{i},{10 + i % 7},{900 if i % 20 == 0 else 20 + i % 30}" for i in range(200)]
    file.write_text("\n".join([header, *rows]) + "\n")
    return file


def test_simulate_a_csv_column(tmp_path: Path) -> None:
    out, png, page = tmp_path / "out.json", tmp_path / "plot.png", tmp_path / "plot.html"
    result = april(
        "simulate", "--lengths-csv", lengths_file(tmp_path), "--lengths-column", "GeneratedTokens", "--prompt-column",
        "ContextTokens", "--ratios", "1,1.5,2", "--json", out, "--png", png, "--html", page, *QUICK,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert [row["ratio"] for row in report["points"]] == [1, 1.5, 2]
    assert report["points"][2]["tokens_per_s"] > report["points"][0]["tokens_per_s"]
    assert report["points"][0]["off_policy_share"] == 0
    assert report["points"][2]["mean_start_age"] == pytest.approx(1.0, abs=0.1)
    assert report["points"][2]["mean_start_age_closed_form"] == 1.0
    assert report["scenario"]["full_engine"]["slots_per_sample"] == 1.0
    assert "Slots / samples in a batch = 8 / 8 = 1.00" in result.output
    assert png.stat().st_size > 1000
    assert page.read_text().startswith("<!doctype html>")


def test_simulate_policies_and_lookaheads(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = april(
        "simulate", "--lengths", TAIL, "--ratios", "1,2", "--policies", "fixed,refill", "--lookaheads", "0,1", "--json",
        out, *QUICK,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["points"]
    assert {(r["admission"], r["lookahead"], r["ratio"]) for r in rows} == {
        (policy, ahead, ratio) for policy in ("fixed", "refill") for ahead in (0, 1) for ratio in (1, 2)
    }
    assert all(r["off_policy_share"] > 0.5 for r in rows if r["lookahead"] == 1)


def test_tune_a_long_and_a_short_tail(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    ratios = ("--ratios", "1,1.5,2", "--lookaheads", "0")
    long = april("tune", "--lengths", TAIL, *ratios, "--json", out, *QUICK)
    assert long.exit_code == 0, long.output
    found = json.loads(out.read_text())["recommendation"]
    assert found["ratio"] > 1
    assert found["gain_95_percent"][0] <= found["gain"] <= found["gain_95_percent"][1]
    short = april("tune", "--lengths", SHORT, *ratios, *QUICK)
    assert short.exit_code == 0
    assert "rollout.ratio = 1," in short.output
    assert "1.0 is best here" in short.output
    assert "The fastest that was tried, ratio 1," not in short.output, "nothing is told to be faster than itself"


def test_limits_that_no_ratio_meets_end_with_2_and_the_distance() -> None:
    result = april(
        "tune", "--lengths", TAIL, "--lookaheads", "1", "--ratios", "1,1.5", "--max-off-policy-share", "0.1", *QUICK
    )
    assert result.exit_code == 2
    assert "no ratio that was tried keeps your limits" in result.output
    assert "over your limit of 10.0%" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate",), "nothing says how long responses are"),
        (("simulate", "--lengths", TAIL, "--ratios", "0.5,1"), "between 1 and 1000"),
        (("simulate", "--lengths", TAIL, "--ratios", "one"), "is no number"),
        (("simulate", "--lengths", TAIL, "--policies", "magic"), "none of fixed"),
        (("simulate", "--lengths", "lognormal:mean=3"), "no length distribution"),
        (("simulate", "--lengths", TAIL, "--lengths-csv", "x.csv"), "give one of them"),
        (("simulate", "--lengths", TAIL, "--max-lag", "0", "--lookaheads", "2"), "too small for all of them"),
        (("simulate", "--lengths", TAIL, "--sigma=3"), "no option of this command"),
        (("tune", "/nowhere"), "there is no trace at"),
        (("trace", "stats", "/nowhere"), "there is no trace at"),
        (("trace", "convert", "/nowhere.txt", "out.jsonl"), "there is no file /nowhere.txt"),
        (("trace", "convert", "/nowhere", "out.txt"), "name it out.jsonl"),
        (("trace", "convert", "/tmp", "out.jsonl"), "is a trace already"),
        (("simulate", "--lengths", TAIL, "--lookaheads", "0.5"), "whole number"),
        (("simulate", "--lengths", TAIL, "--lookaheads", "1000"), "between 0 and 64"),
        (("simulate", "--lengths", TAIL, "--trainer-s", "nan"), "finite"),
        (("simulate", "--lengths", TAIL, "--install-s", "inf"), "not in the range"),
        (("simulate", "--lengths", TAIL, "--ratios", "nan"), "between 1 and 1000"),
        (("simulate", "--lengths", TAIL, "--rounds", "0"), "not in the range"),
        (("simulate", "--lengths", TAIL, "--groups", "1000000000"), "not in the range"),
        (("tune", "--lengths", TAIL, "--max-off-policy-share", "nan"), "finite"),
        (("tune", "--lengths", TAIL, "--max-mean-lag", "nan"), "finite"),
        (("simulate", "--lengths", TAIL, "--json", "/nowhere/out.json"), "can't write /nowhere/out.json"),
        (("simulate", "--lengths", TAIL, "--png", "/nowhere/out.png"), "can't write /nowhere/out.png"),
        (("simulate", "--lengths", TAIL, "--html", "/nowhere/out.html"), "can't write /nowhere/out.html"),
        (("calibrate", "/nowhere", "--engine.backend=ray"), "no option of this command"),
        (("simulate", "--lengths", "lognormal:median=40,prompt=-1"), "not negative"),
        (("simulate", "--lengths", "lognormal:median=1e300"), "smaller numbers"),
        (("simulate", "--lengths", "lognormal:median=40,median=50"), "names something twice"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    result = april(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_list_that_gzip_packed_is_called_that(tmp_path: Path) -> None:
    packed = tmp_path / "log.csv"
    packed.write_bytes(gzip.compress(lengths_file(tmp_path).read_bytes()))
    result = april("simulate", "--lengths-csv", packed, "--lengths-column", "GeneratedTokens", *QUICK)
    assert result.exit_code == 2, result.output
    assert "gzip -d" in result.output


def test_progress_is_plain_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    now_s = 0.0
    lines = PlainLines("simulating", 100, said.append, lambda: now_s)
    for second in range(1, 61):
        now_s = float(second)
        lines.part_done()
    assert said[0] == "simulating: 10 of 100 parts after 10 s"
    assert len(said) == 6
    monkeypatch.setattr(tuning_progress, "LINE_EVERY_S", 0.0)
    result = april("simulate", "--lengths", TAIL, "--ratios", "1,2", *QUICK)
    assert result.stderr.splitlines()[-1].startswith("simulating 40 rounds each: 8 of 8 parts after")
    assert "parts after" not in result.stdout


def test_help_says_what_the_lag_bound_is() -> None:
    text = " ".join(april("simulate", "--help").output.split())
    assert "the run's, else none that binds" in text


def test_convert_then_stats_and_simulate(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    assert april("trace", "convert", TAIL, trace, "--prompts", "50", "--samples", "4").exit_code == 0
    out = tmp_path / "out.json"
    result = april("trace", "stats", trace, "--json", out)
    assert result.exit_code == 0, result.output
    statistics = json.loads(out.read_text())
    assert statistics["num_finished"] == 200
    assert april("simulate", trace, "--ratios", "1,2", *QUICK).exit_code == 0


def test_no_command_replaces_what_it_reads(tmp_path: Path) -> None:
    log, trace = lengths_file(tmp_path), tmp_path / "t.jsonl"
    assert april("trace", "convert", log, trace, "--lengths-column", "GeneratedTokens").exit_code == 0
    before = {file: file.read_bytes() for file in (log, trace)}
    for arguments in (
        ("simulate", "--lengths-csv", log, "--lengths-column", "GeneratedTokens", "--json", log),
        ("tune", trace, "--html", trace),
        ("trace", "stats", trace, "--json", trace),
        ("calibrate", trace, "--json", trace),
    ):
        result = april(*arguments)
        assert result.exit_code == 2, result.output
        assert "would be replaced" in result.output
    assert {file: file.read_bytes() for file in before} == before


@pytest.mark.parametrize(
    ("numbers", "message"),
    [({"step_base_s": 0, "step_per_sequence_s": 0}, "takes no time"), ({"step_base_s": float("inf")}, "step_base_s"),
     ({"step_base_s": 1e300}, "step_base_s"), ({"slots": 8.5}, "slots"), ({"slots": True}, "slots"),
     ({"slots": 0}, "slots"), ({"kv_tokens": 1e400}, "kv_tokens")],
)  # fmt: skip
def test_an_engine_of_no_use_is_refused(tmp_path: Path, numbers: dict[str, object], message: str) -> None:
    file = tmp_path / "engine.json"
    file.write_text(json.dumps({"version": 1, "engine": EngineModel(slots=8).to_json() | numbers}))
    result = april("simulate", "--lengths", TAIL, "--engine", file, *QUICK)
    assert result.exit_code == 2, result.output
    assert message in result.output


def test_tables_fit_80_characters(tmp_path: Path) -> None:
    arguments = ["simulate", "--lengths", TAIL, "--ratios", "1,3", *QUICK]
    output = CliRunner().invoke(main, arguments, env={"COLUMNS": "80"}).output
    assert "…" not in output.replace("0, 1, 2, …", "")


def test_a_killed_process_of_a_sweep_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(self: object, *_: object) -> object:
        future: Future[object] = Future()
        future.set_exception(BrokenProcessPool("killed"))
        return future

    monkeypatch.setattr(ProcessPoolExecutor, "submit", killed)
    result = april("simulate", "--lengths", TAIL, "--ratios", "1", "--rounds", "4", "--processes", "2")
    assert result.exit_code == 2, result.output
    assert "a process of the simulation was killed" in result.output


def children_of(pid: int) -> set[int]:
    """Processes that this one started, of those that /proc knows."""
    found: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.add(int(stat.parent.name))
    return found


def runs(pid: int) -> bool:
    """Whether there is such a process, and not only its exit code that nobody has asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_command_that_is_killed_leaves_no_process() -> None:
    command = [
        sys.executable,
        "-m",
        "deploy.cli",
        "simulate",
        "--lengths",
        TAIL,
        "--processes",
        "2",
        "--rounds",
        "100000",
    ]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(started := children_of(parent.pid)) < 2:
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    while any(runs(pid) for pid in started):
        time.sleep(0.05)


def test_help_names_the_commands() -> None:
    text = april("--help").output
    for name in ("simulate", "tune", "calibrate", "trace"):
        assert name in text


async def test_a_run_leaves_what_tune_calibrate_and_stats_read(tmp_path: Path) -> None:
    settings = service_settings(
        tmp_path,
        rollout={"n": 2, "ratio": 2.0, "lookahead": 0, "max_lag": 4},
        engine={
            "backend": "simulated",
            "max_num_seqs": 16,
            "simulated": {"median_tokens": 12, "step_base_s": 0.003, "step_per_sequence_s": 0.0002},
        },
    )
    recorder = open_trace(settings, 1)
    async with running_service(settings, trace=recorder) as service:
        headers = await service.open_trainer()
        for step in range(1, 9):
            await service.batch(step, headers)
            await service.publish(step, headers)
    recorder.close()

    def commands() -> None:
        calibrated = april("calibrate", tmp_path)
        assert calibrated.exit_code == 0, calibrated.output
        engine = json.loads((tmp_path / "calibration.json").read_text())["engine"]
        assert engine["slots"] == 16
        assert engine["step_base_s"] + engine["step_per_sequence_s"] > 0
        out = tmp_path / "out.json"
        tuned = april("tune", tmp_path, "--ratios", "1,1.5", "--rounds", "40", "--processes", "1", "--json", out)
        assert tuned.exit_code == 0, tuned.output
        report = json.loads(out.read_text())
        assert report["scenario"]["batch_groups"] == 4
        assert report["scenario"]["engine"] == engine
        assert {2.0, 1.0} <= {row["ratio"] for row in report["points"]}, "the run's own ratio is tried, too"
        stats = april("trace", "stats", tmp_path)
        assert stats.exit_code == 0, stats.output
        assert "8 rounds" in stats.output or "9 rounds" in stats.output

    await asyncio.to_thread(commands)
