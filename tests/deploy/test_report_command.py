"""`april report`: files that are whole, a summary in the terminal, sentences for mistakes."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from deploy import report_command
from deploy.cli import main
from deploy.report_command import facts_table, tail_table
from protocol.watching import RunReport
from rollout_service.tuning.trace_open import open_trace
from tests.support import pictures
from tests.support.service import running_service, service_settings


def april(*words: object):
    return CliRunner().invoke(main, [str(word) for word in words])


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def finished_run(folder: Path, num_steps: int = 4) -> None:
    """The folder of a run on the simulated engine."""
    settings = service_settings(folder)
    recorder = open_trace(settings, 1)
    async with running_service(settings, trace=recorder) as service:
        headers = await service.open_trainer()
        for step in range(1, num_steps + 1):
            await service.batch(step, headers)
            await service.publish(step, headers)
    recorder.close()


async def test_a_run_becomes_one_file_and_a_summary(tmp_path: Path) -> None:
    await finished_run(tmp_path / "run")
    done = april("report", tmp_path / "run", "--json", tmp_path / "report.json", "--no-predict")
    assert done.exit_code == 0, done.output
    html = (tmp_path / "run" / "report.html").read_text()
    made = RunReport.model_validate_json((tmp_path / "report.json").read_text())
    assert html.lower().startswith("<!doctype html>")
    assert "http://" not in html.split("<script")[0], "it loads nothing from anywhere"
    assert made.run == "test"
    assert len(made.timeline.rounds) >= 4
    assert f"written: {tmp_path / 'run' / 'report.html'}" in done.output
    assert f"written: {tmp_path / 'report.json'}" in done.output
    assert made.verdict.sentence in done.output
    assert f"{made.tail.num_finished:,} responses" in done.output
    assert names_in(tmp_path) == ["report.json", "run"], "no half-written file is left"


async def test_the_html_goes_where_it_is_told_to_and_is_replaced(tmp_path: Path) -> None:
    await finished_run(tmp_path / "run", 2)
    there = tmp_path / "there.html"
    there.write_text("old")
    assert april("report", tmp_path / "run", "--html", there, "--no-predict").exit_code == 0
    assert there.read_text() != "old"
    assert not (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(["NONE"], "there is no folder"), (["EMPTY"], "has no trace"), (["EMPTY", "--json", "/"], "is a directory")],
)
def test_mistakes_are_sentences(tmp_path: Path, words: list[str], sentence: str) -> None:
    (tmp_path / "empty").mkdir()
    named = {"NONE": tmp_path / "none", "EMPTY": tmp_path / "empty"}
    done = april("report", *(named.get(word, word) for word in words))
    assert done.exit_code == 2
    assert sentence in done.output
    assert "Traceback" not in done.output


async def test_a_folder_that_is_not_there_costs_a_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    await finished_run(tmp_path / "run", 2)
    done = april("report", tmp_path / "run", "--html", tmp_path / "none" / "x.html", "--no-predict")
    assert done.exit_code == 2
    assert "can't write" in done.output
    assert names_in(tmp_path) == ["run"]


async def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await finished_run(tmp_path / "run", 2)
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(self: Path, _: bytes) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    done = april("report", tmp_path / "run", "--html", path, "--no-predict")
    assert done.exit_code == 2
    assert "No space left" in done.output
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["report.html", "run"]


async def test_what_the_run_left_is_never_replaced_and_a_device_is_written_to(tmp_path: Path) -> None:
    await finished_run(tmp_path / "run", 2)
    (trace,) = (tmp_path / "run" / "trace").iterdir()
    before = trace.read_bytes()
    done = april("report", tmp_path / "run", "--json", trace, "--no-predict")
    assert done.exit_code == 2
    assert "would be replaced" in done.output
    assert trace.read_bytes() == before
    device = tmp_path / "null"
    device.symlink_to("/dev/null")
    done = april("report", tmp_path / "run", "--json", device, "--no-predict")
    assert done.exit_code == 0, done.output
    assert device.is_char_device()


def test_tables_name_every_fact(capsys: pytest.CaptureFixture[str]) -> None:
    made = pictures.report()
    assert facts_table(made).row_count == len(made.facts) + (made.ratio is not None) * 2
    assert tail_table(made).row_count == 3
    report_command.show(made, [Path("x.html")])
    shown = capsys.readouterr().out
    assert all(name in shown for name in made.facts)
    assert made.verdict.advice in shown
    assert all(note in shown for note in made.notes)
    assert json.loads(made.model_dump_json())["run"] in shown


async def test_metrics_that_are_not_finite_are_not_known(tmp_path: Path) -> None:
    await finished_run(tmp_path, 2)
    (tmp_path / "trainer").mkdir()
    lines = '{"step": 1, "reward/mean": NaN}\n{"step": 2, "reward/mean": 1e999, "lag/mean": 1}\n{"step": 3, "x": 1%s}\n'
    (tmp_path / "trainer" / "metrics.jsonl").write_text(lines % ("0" * 400))
    done = april("report", tmp_path, "--json", tmp_path / "report.json", "--no-predict")
    assert done.exit_code == 0, done.output
    assert "metrics.jsonl: 1 line is torn" in done.output
    assert json.loads((tmp_path / "report.json").read_text())["steps"]["series"] == {"lag/mean": [None, 1.0]}
