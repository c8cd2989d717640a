"""The report of a run's folder, against the run that left it."""

import json
from pathlib import Path

import pytest

from protocol.errors import DataError, SettingsError
from protocol.settings import RunSettings
from protocol.watching import RunReport
from rollout_service.main import serve
from rollout_service.picture_book import PictureBook
from rollout_service.tuning.trace_open import open_trace
from rollout_service.watch import restore
from rollout_service.watch.recent import Watch
from rollout_service.watch.record import FOLDER, SETTINGS_NAME, VERSIONS_NAME, write_record
from rollout_service.watch.report import run_report
from rollout_service.watch.restore import restore_watch
from rollout_service.watch.tail import tail
from rollout_service.watch.timeline import timeline
from tests.support.service import running_service, service_settings


async def leave_a_run(folder: Path, num_steps: int = 6, epoch: int = 1, **changes):
    """A run with its trace and the trainer's metrics; what the service itself had to show at its end."""
    settings = service_settings(folder, rollout={"n": 2, "ratio": 2.0, "lookahead": 0, "max_lag": 4}, **changes)
    write_record(settings)
    recorder = open_trace(settings, epoch)
    (folder / "trainer").mkdir(exist_ok=True)
    async with running_service(settings, trace=recorder) as service:
        headers = await service.open_trainer()
        with (folder / "trainer" / "metrics.jsonl").open("a") as metrics:
            for step in range(1, num_steps + 1):
                await service.batch(step, headers)
                values = {"reward/mean": step / 10, "timing_s/wait": 0.5, "timing_s/step": 1.0}
                metrics.write(json.dumps({"step": step, "at": 1.5, **values}) + "\n")
                await service.publish(step, headers)
        await service.client.post("/v1/pause")
        await service.until(lambda: not service.parts.loop.num_running)
        board = service.host.running.board
        assert isinstance(board.pictures, PictureBook)
        await service.until(lambda: not recorder.num_scoring)
        view = board.pictures.view(running=False)
    recorder.close()
    return view


async def test_a_dead_run_shows_what_the_live_one_showed(tmp_path: Path) -> None:
    live = await leave_a_run(tmp_path)
    report = run_report(tmp_path, predict=False)
    shown, before = timeline(live, 30, 20_000), report.timeline
    assert [span.round for span in before.rounds] == [span.round for span in shown.rounds]
    for mine, its in zip(before.rounds, shown.rounds, strict=True):
        assert mine.model_dump() == its.model_dump()
    assert (
        json.loads(before.model_dump_json())["samples"] == json.loads(shown.model_dump_json(warnings=False))["samples"]
    )
    assert report.tail == tail(live)
    assert report.steps.series["reward/mean"] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert report.verdict.measured["trainer_wait_share"] == 0.5
    assert report.facts["num_rounds"] >= 6
    assert report.facts["num_steps"] == 6
    assert report.facts["reward/mean (last)"] == 0.6
    assert report.facts["num_tokens"] == sum(a[3] for a in _segments(report))
    assert report.notes == []
    assert report.versions["april-rollout"]
    assert report.settings["rollout"]["ratio"] == 2.0
    assert report.ratio.ratio == 2.0
    assert RunReport.model_validate_json(report.model_dump_json()).tail == report.tail


def _segments(report: RunReport):
    return [
        (s.version, s.start, s.end, s.num_tokens)
        for bar in report.timeline.samples
        for a in bar.attempts
        for s in a.segments
    ]


async def test_two_lives_are_one_run(tmp_path: Path) -> None:
    await leave_a_run(tmp_path, 3, epoch=1)
    first = run_report(tmp_path, predict=False)
    await leave_a_run(tmp_path, 3, epoch=2)
    both = run_report(tmp_path, predict=False)
    assert "the service was started 2 times" in both.notes
    assert both.facts["num_responses"] > first.facts["num_responses"]
    assert both.steps.steps == [1, 2, 3]


async def test_torn_and_foreign_lines_are_passed_over_and_said(tmp_path: Path) -> None:
    await leave_a_run(tmp_path)
    whole = run_report(tmp_path, predict=False)
    (file,) = (tmp_path / "trace").glob("*.jsonl")
    lines = file.read_text().splitlines(keepends=True)
    middle = len(lines) // 2
    torn = [*lines[:middle], '{"kind":"attempt","sam\n', "\n", *lines[middle:], lines[-1][:20]]
    file.write_text("".join(torn))
    (tmp_path / "trace" / "000009-0000.jsonl").write_text("")
    (tmp_path / "trace" / "000010-0000.jsonl").write_text('{"not": "ours"}\n' + lines[5])
    with (tmp_path / "trainer" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 7, "rew')
    report = run_report(tmp_path, predict=False)
    assert report.tail == whole.tail
    assert report.facts == whole.facts
    assert report.notes == [
        f"{file.name}: the last line is torn and was left out",
        f"{file.name}: 2 lines are no lines of a trace and were left out",
        "000009-0000.jsonl is empty and was passed over",
        "000010-0000.jsonl has no header that this version of april reads and was passed over",
        "metrics.jsonl: 1 line is torn and was left out",
    ]


async def test_a_folder_without_more_than_a_trace_has_a_report(tmp_path: Path) -> None:
    await leave_a_run(tmp_path)
    (tmp_path / "trainer" / "metrics.jsonl").unlink()
    for name in (SETTINGS_NAME, VERSIONS_NAME):
        (tmp_path / FOLDER / name).unlink()
    report = run_report(tmp_path, predict=False)
    assert (report.settings, report.versions, report.steps.steps) == ({}, {}, [])
    assert len(report.notes) == 2
    assert report.timeline.samples
    assert report.facts["num_steps"] == 6, "the trace tells of trained steps, too"


async def test_totals_of_a_part_of_the_trace_say_so(tmp_path: Path) -> None:
    await leave_a_run(tmp_path, 3)
    (file,) = (tmp_path / "trace").glob("*.jsonl")
    header, *lines = file.read_text().splitlines(keepends=True)
    rounds = [number for number, line in enumerate(lines) if json.loads(line)["kind"] == "round"]
    number = json.loads(lines[rounds[1]])["round"]
    lost = '{"kind":"lost","num_lines":7}\n'
    rest = json.dumps(json.loads(header) | {"file": 4}) + "\n" + "".join(lines[rounds[0] + 1 :]) + lost
    file.with_name("000001-0004.jsonl").write_text(rest)
    file.unlink()
    (tmp_path / "trainer" / "metrics.jsonl").write_text("")
    report = run_report(tmp_path, predict=False)
    assert report.notes == [
        "000001-0004.jsonl: 4 files before it are gone",
        f"the trace begins at round {number}: what was before is gone (trace.max_files) or was not traced, and the "
        "totals are of the rest",
        "7 lines were not written, since the disk was too slow: the totals lack them",
    ]
    kept = [line for line in lines if json.loads(line)["kind"] != "trained"]
    file.write_text(header + "".join(kept))
    file.with_name("000001-0004.jsonl").unlink()
    report = run_report(tmp_path, predict=False)
    assert report.notes == []
    assert "num_steps" not in report.facts, "nobody told of them"


async def test_a_file_that_is_taken_away_meanwhile_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await leave_a_run(tmp_path, 2)
    (file,) = (tmp_path / "trace").glob("*.jsonl")
    gone = file.with_name("000000-0000.jsonl")
    monkeypatch.setattr("rollout_service.watch.folder.trace_files", lambda _: [gone, file])
    report = run_report(tmp_path, predict=False)
    assert report.notes == [f"{gone.name} was removed while it was read, as the oldest beyond trace.max_files is"]


@pytest.mark.parametrize("depth", [300, 900, 100_000])  # Python reads the first two, but can't write them again
async def test_files_nested_too_deeply_are_damaged_ones(tmp_path: Path, depth: int) -> None:
    await leave_a_run(tmp_path, 2)
    with (tmp_path / "trainer" / "metrics.jsonl").open("a") as metrics:
        metrics.write("[" * depth + "]" * depth + "\n" + '{"step": 3, "reward/mean": 0.3}\n')
    for name in (SETTINGS_NAME, VERSIONS_NAME):
        (tmp_path / FOLDER / name).write_text('{"a":' + "[" * depth + "]" * depth + "}")
    (file,) = (tmp_path / "trace").glob("*.jsonl")
    with file.open("a") as trace:
        trace.write("[" * depth + "]" * depth + "\n")
    report = run_report(tmp_path, predict=False)
    report.model_dump_json()
    assert report.steps.steps == [1, 2, 3]
    assert report.notes == [
        f"{file.name}: 1 line is no line of a trace and was left out",
        "the run's settings were not kept in its folder",
        "metrics.jsonl: 1 line is torn and was left out",
    ]
    watch = Watch()
    restore_watch(watch, service_settings(tmp_path))
    assert watch.steps.last_step == 3


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "000001-0000.jsonl is empty"),
        ("\x00\xff\n", "no header that this version of april reads"),
        ('{"kind":"round"}\n', "no header that this version of april reads"),
        (
            '{"kind":"header","schema_name":"april-trace","version":7,"run":"test"}\n',
            r"another version of april \(schema 7, this one reads 1\)",
        ),
        ('{"kind":"header","run":"test"}\n{"kind":\n', "1 line is no line of a trace"),
        ('{"kind":"header","run":"test"}\n', "is empty: let the run offer a batch"),
    ],
)
def test_a_trace_with_nothing_to_read_says_why(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "000001-0000.jsonl").write_text(content)
    with pytest.raises(DataError, match=says):
        run_report(tmp_path)


def test_what_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        run_report(tmp_path / "nowhere")
    with pytest.raises(DataError, match="has no trace"):
        run_report(tmp_path)
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "000001-0000.jsonl").write_text("")
    with pytest.raises(DataError, match="is empty"):
        run_report(tmp_path)


async def test_traces_of_two_runs_are_refused(tmp_path: Path) -> None:
    await leave_a_run(tmp_path, 1)
    (file,) = (tmp_path / "trace").glob("*.jsonl")
    (tmp_path / "trace" / "000002-0000.jsonl").write_text(file.read_text().replace('"run":"test"', '"run":"other"'))
    with pytest.raises(DataError, match="the runs test and other"):
        run_report(tmp_path, predict=False)


async def test_progress_reaches_the_end(tmp_path: Path) -> None:
    await leave_a_run(tmp_path, 2)
    told: list[tuple[int, int]] = []
    run_report(tmp_path, lambda done, total: told.append((done, total)), predict=False)
    (file,) = (tmp_path / "trace").glob("*.jsonl")
    assert told[-1] == (file.stat().st_size, file.stat().st_size)


def test_no_secret_is_kept(tmp_path: Path) -> None:
    settings = service_settings(
        tmp_path,
        service={"token": "a-very-secret-token"},
        buffer={"url": "redis://joe:hunter22@10.0.0.1:6379", "password": "another-secret"},
        reward={"settings": {"api_key": "third-secret"}},
    )
    write_record(settings)
    write_record(settings)
    text = (tmp_path / FOLDER / SETTINGS_NAME).read_text()
    for secret in ("a-very-secret-token", "hunter22", "another-secret", "third-secret"):
        assert secret not in text
    assert json.loads(text)["buffer"]["max_groups"] == 100_000
    assert "python" in json.loads((tmp_path / FOLDER / VERSIONS_NAME).read_text())
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == [SETTINGS_NAME, VERSIONS_NAME]


async def test_a_service_that_is_started_again_remembers(tmp_path: Path) -> None:
    live = await leave_a_run(tmp_path)
    watch = Watch(live.limits)
    restore_watch(watch, service_settings(tmp_path))
    again = watch.view(live.now)
    assert again.rounds == live.rounds
    assert [held.sample for held in again.samples] == [held.sample for held in live.samples]
    assert watch.steps.last_step == 6


async def test_only_the_end_of_a_long_trace_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = await leave_a_run(tmp_path, 3, epoch=1)
    await leave_a_run(tmp_path, 3, epoch=2)
    (tmp_path / "trace" / "000003-0000.jsonl").write_text("")
    newest = tmp_path / "trace" / "000002-0000.jsonl"
    monkeypatch.setattr(restore, "NEWEST_BYTES", newest.stat().st_size // 2)
    watch = Watch()
    restore_watch(watch, service_settings(tmp_path))
    assert 0 < len(watch.view(0.0).samples) < len(live.samples)
    assert watch.view(0.0).samples[0].first_at > live.samples[-1].first_at


async def test_a_trace_that_can_not_be_read_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await leave_a_run(tmp_path, 1)
    (file,) = (tmp_path / "trace").glob("*.jsonl")
    (tmp_path / "trace" / "000002-0000.jsonl").write_text(file.read_text().replace('"run":"test"', '"run":"other"'))
    restore_watch(Watch(), service_settings(tmp_path))
    assert "pictures begin anew" in caplog.text


def test_a_service_that_is_refused_leaves_the_record_of_the_one_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(service_settings(tmp_path, service={"port": 1111}))
    before = (tmp_path / FOLDER / SETTINGS_NAME).read_bytes()

    def refuse(settings: RunSettings) -> None:
        raise SettingsError("another service runs there")

    monkeypatch.setattr("rollout_service.main.open_parts", refuse)
    with pytest.raises(SettingsError, match="another service"):
        serve(service_settings(tmp_path, service={"port": 0}))
    assert (tmp_path / FOLDER / SETTINGS_NAME).read_bytes() == before
