"""Traces of runs that go on, and of runs whose lives had other budgets: what is known of lengths, and what is said."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from protocol.errors import DataError
from protocol.samples import Prompt
from rollout_service.tuning import trace_recorder
from rollout_service.tuning.lengths import lengths_of_trace, survival_of_trace
from rollout_service.tuning.lengths_stats import trace_statistics
from rollout_service.tuning.trace_reader import read_trace
from rollout_service.tuning.trace_recorder import TraceRecorder
from rollout_service.tuning.trace_records import LINE, Header, MomentLine, RunningLine, RunningSample
from tests.rollout_service.tuning.records import attempt, header, limits


def write(path: Path, *lines) -> Path:
    """A trace file."""
    path.write_text("".join(line.model_dump_json() + "\n" for line in lines))
    return path


def running(*samples: tuple[str, int], continued_from: str | None = None) -> RunningLine:
    """What runs: (sample, tokens)."""
    standing = tuple(RunningSample(name, "p", "test", 5, tokens, continued_from) for name, tokens in samples)
    return RunningLine(at=110.0, samples=standing)


def moment(num_running: int, at: float = 110.0) -> MomentLine:
    """So many run."""
    return MomentLine(at=at, values={"running": float(num_running)})


def test_a_sample_that_runs_counts_as_longer_than_was_last_written(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl",
        header(),
        attempt("g1.000", 9),
        attempt("g1.001", 20, end="parked"),
        running(("g1.001", 33), ("g2.000", 50), ("g2.001", 60)),
        moment(3),
        running(("g1.001", 40), ("g2.000", 70)),
        attempt("g2.001", 90, started_at=105.0, ended_at=111.0),
    )
    trace = read_trace(file)
    known = {s.sample_id: (s.num_tokens, s.finished) for s in trace.samples}
    assert known == {"g1.000": (9, True), "g1.001": (40, False), "g2.000": (70, False), "g2.001": (90, True)}
    assert trace.notes == ["2 responses still run and count as longer than when last written of"]
    assert survival_of_trace(trace).num_censored == 2


def test_one_that_goes_on_under_another_id_is_still_one_sample(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl",
        header(),
        attempt("g1.000", 9),
        attempt("g1.001", 20, end="parked"),
        running(("g5.000", 44), continued_from="g1.001"),
    )
    known = {s.sample_id: s.num_tokens for s in read_trace(file).samples}
    assert known == {"g1.000": 9, "g1.001": 44}


def test_what_runs_and_is_not_in_the_trace_is_counted_in_a_note(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl",
        header(),
        attempt("g1.000", 9, ended_at=105.0),
        moment(8, at=106.0),
        attempt("g1.001", 12, started_at=105.0, ended_at=107.0),
        attempt("g1.002", 3, started_at=106.5, ended_at=107.0),
    )
    found = trace_statistics(read_trace(file))
    assert any(note.startswith("7 responses that run are not in the trace yet") for note in found.notes)


def test_a_first_round_that_goes_on_is_not_biased_short(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).lognormal(4, 1, 2000).astype(int) + 1
    now = 60
    lines = [attempt(f"g{i}.000", int(x)) for i, x in enumerate(lengths) if x <= now]
    short = write(tmp_path / "short.jsonl", header(), *lines)
    rest = [(f"g{i}.000", now) for i, x in enumerate(lengths) if x > now]
    whole = write(tmp_path / "whole.jsonl", header(), *lines, running(*rest))
    median = float(np.median(lengths))
    assert survival_of_trace(read_trace(short)).quantile(0.5) < 0.7 * median
    assert survival_of_trace(read_trace(whole)).quantile(0.5) == pytest.approx(median, rel=0.05)


def test_the_recorder_tells_of_what_runs_and_the_longer_it_is_the_less_often(monkeypatch) -> None:
    lines: list[dict] = []
    recorder = TraceRecorder([lines.append])
    now = 1000.0
    monkeypatch.setattr(trace_recorder.time, "monotonic", lambda: now)
    recorder._born_at = recorder._running_at = recorder.now()
    prompt = Prompt(prompt_id="p7", data_source="math", token_ids=(1, 2, 3), text="")
    traces = [recorder.attempt(f"g1.00{k}", 1, prompt, before=10 * k) for k in range(2)]
    traces[1].wrote(5, 0)
    told_at: list[float] = []
    for second in range(1, 101):
        now = 1000.0 + second
        recorder._tell_running(recorder.now())
        if len(lines) > len(told_at):
            told_at.append(second)
    assert LINE.validate_python(lines[-1]).samples == (
        RunningSample("g1.000", "p7", "math", 3, 0, None), RunningSample("g1.001", "p7", "math", 3, 15, None)
    )  # fmt: skip
    assert len(told_at) == 100, "two samples cost nothing"
    recorder._born_at = recorder._running_at = recorder.now()
    many = [recorder.attempt(f"g2.{k:03}", 1, prompt, before=0) for k in range(200)]
    lines.clear()
    for second in range(1, 1001):
        now = 1100.0 + second
        recorder._tell_running(recorder.now())
    assert 20 < len(lines) < 80, "each second at first, then every 10 % of its age, and 100 s apart at most"
    for trace in (*traces, *many):
        trace.ended(None)
    lines.clear()
    now += 1000.0
    recorder._tell_running(recorder.now())
    assert not lines


def lives(tmp_path: Path, budget_before: int, budget_now: int) -> Path:
    """Two lives of one service, each with a file."""
    for epoch, budget in ((1, budget_before), (2, budget_now)):
        of_run = Header(run="test", service_epoch=epoch, limits=limits(max_response_length=budget))
        lines = []
        for index, length in enumerate(range(10, 210, 10)):
            cut = length > budget
            lines.append(attempt(f"e{epoch}g{index}.000", min(length, budget), end="length" if cut else "stop"))
        write(tmp_path / f"{epoch:06}-0000.jsonl", of_run, *lines)
    return tmp_path


def test_an_older_smaller_budget_is_no_length(tmp_path: Path) -> None:
    trace = read_trace(lives(tmp_path, 60, 1000))
    assert survival_of_trace(trace).quantile(0.5) == 100
    assert survival_of_trace(trace).num_censored == 14
    assert "14 responses ended at an older max_response_length below 1000" in trace.notes[0]
    assert max(lengths_of_trace(trace).lengths) == 200


def test_an_older_larger_budget_counts_as_cut_at_the_present_one(tmp_path: Path) -> None:
    trace = read_trace(lives(tmp_path, 1000, 60))
    assert {s.num_tokens for s in trace.finished} == {10, 20, 30, 40, 50, 60}
    assert survival_of_trace(trace).num_censored == 0
    assert "14 responses of another max_response_length count as cut at the present one, 60" in trace.notes[0]


def test_the_budget_that_a_run_will_have_is_what_counts(tmp_path: Path) -> None:
    folder = lives(tmp_path, 60, 60)
    assert not read_trace(folder).notes
    raised = read_trace(folder, budget=500)
    assert survival_of_trace(raised).num_censored == 28
    assert survival_of_trace(raised).quantile(0.5) is None


def test_a_trace_that_gzip_packed_is_called_that(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", header(), attempt("g1.000", 9))
    packed = tmp_path / "packed" / "b.jsonl.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(file.read_bytes()))
    renamed = tmp_path / "renamed.jsonl"
    renamed.write_bytes(packed.read_bytes())
    for named in (packed, packed.parent, renamed):
        with pytest.raises(DataError, match="gzip -d"):
            read_trace(named)
