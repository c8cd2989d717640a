"""Files of traces: rotation, crashes, and what is refused."""

import json
import logging
from pathlib import Path

import pytest

from protocol.errors import DataError
from rollout_service.tuning import trace_reader, trace_writer
from rollout_service.tuning.lengths import lengths_of_trace
from rollout_service.tuning.trace_reader import read_trace
from rollout_service.tuning.trace_records import LINE, ScoreLine
from rollout_service.tuning.trace_writer import TraceWriter, trace_folder
from tests.rollout_service.tuning.records import attempt, header


def write(path: Path, *lines, torn: bytes = b"") -> Path:
    """A file of lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(line.model_dump_json().encode() + b"\n" for line in lines) + torn)
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    writer = TraceWriter(trace_folder(tmp_path), header(), 1 << 20, 4)
    for index in range(100):
        writer.put(attempt(f"g{index}.000", index + 1).model_dump())
        writer.put(ScoreLine(sample=f"g{index}.000", reward=index / 100).model_dump())
    writer.close()
    trace = read_trace(tmp_path)
    assert [s.num_tokens for s in trace.samples] == list(range(1, 101))
    assert [s.reward for s in trace.samples] == [i / 100 for i in range(100)]
    assert trace.notes == []


def test_every_file_has_a_header_and_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_writer, "FLUSH_INTERVAL_S", 0.001)
    writer = TraceWriter(tmp_path, header(epoch=3), 2000, 3)
    for index in range(60):
        writer.put(attempt(f"g{index}.000", 7).model_dump())
    writer.close()
    files = sorted(tmp_path.glob("*.jsonl"))
    assert len(files) == 3
    names = [LINE.validate_json(file.read_bytes().split(b"\n")[0]) for file in files]
    assert [h.kind for h in names] == ["header"] * 3
    assert [h.file for h in names] == [int(f.stem.split("-")[1]) for f in files]  # pyright: ignore[reportAttributeAccessIssue]
    assert names[0].file > 0, "the first files are gone"  # pyright: ignore[reportAttributeAccessIssue]
    assert all(file.stat().st_size < 2000 + 600 for file in files)
    trace = read_trace(tmp_path)
    assert trace.samples[-1].sample_id == "g59.000"
    assert [s.sample_id for s in trace.samples] == [f"g{i}.000" for i in range(60 - len(trace.samples), 60)]


def test_a_torn_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    file = write(tmp_path / "000001-0000.jsonl", header(), attempt("g1.000", 9), torn=b'{"kind":"attempt","sam')
    trace = read_trace(file)
    assert [s.num_tokens for s in trace.samples] == [9]
    assert "torn" in trace.notes[0]


def test_lives_of_a_service_follow_each_other(tmp_path: Path) -> None:
    write(tmp_path / "000001-0000.jsonl", header(epoch=1), attempt("g1.000", 9, end="parked"), torn=b"{")
    write(tmp_path / "000002-0000.jsonl", header(epoch=2), attempt("g1.000", 11, before=14, number=3))
    trace = read_trace(tmp_path)
    (sample,) = trace.samples
    assert sample.finished
    assert sample.num_tokens == 25, "14 tokens were there, though the line of the second attempt is lost"


def test_unknown_schema_and_foreign_files_are_refused(tmp_path: Path) -> None:
    newer = write(tmp_path / "a.jsonl", header().model_copy(update={"version": 99}), attempt("g1.000", 9))
    with pytest.raises(DataError, match="version 99"):
        read_trace(newer)
    foreign = tmp_path / "b.jsonl"
    foreign.write_text('{"hello": 1}\n')
    with pytest.raises(DataError, match="not a trace of this project"):
        read_trace(foreign)


def test_mixed_runs_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "000001-0000.jsonl", header("alpha"), attempt("g1.000", 9))
    write(tmp_path / "000002-0000.jsonl", header("beta", 2), attempt("g2.000", 9))
    with pytest.raises(DataError, match="alpha and beta"):
        read_trace(tmp_path)


def test_a_broken_line_inside_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", header(), attempt("g1.000", 9))
    file.write_bytes(file.read_bytes() + b'{"kind": "attempt"}\n' + file.read_bytes().split(b"\n")[1] + b"\n")
    with pytest.raises(DataError, match="line 3"):
        read_trace(file)


def test_lines_of_a_later_minor_version_are_read(tmp_path: Path) -> None:
    line = attempt("g1.000", 9).model_dump() | {"temperature": 0.7}
    file = write(tmp_path / "a.jsonl", header())
    file.write_bytes(file.read_bytes() + json.dumps(line).encode() + b"\n")
    assert read_trace(file).samples[0].num_tokens == 9


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "is empty"),
        ((header(),), "no sample yet"),
        ((header(), attempt("g1.000", 4, end="parked")), "has finished"),
    ],
)
def test_nothing_to_go_by(tmp_path: Path, lines, message: str) -> None:
    file = write(tmp_path / "a.jsonl", *lines)
    with pytest.raises(DataError, match=message):
        lengths_of_trace(read_trace(file))


def test_no_trace_at_all(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no trace"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(DataError, match="has no trace"):
        read_trace(tmp_path)


def test_a_full_disk_stops_the_trace_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_open = Path.open
    monkeypatch.setattr(Path, "open", lambda self, mode="r": real_open(Path("/dev/full"), mode))
    with caplog.at_level(logging.WARNING):
        writer = TraceWriter(tmp_path, header(), 1 << 20, 2)
        for index in range(1000):
            writer.put(attempt(f"g{index}.000", 5).model_dump())
        writer.close()
        writer.put(attempt("g0.001", 5).model_dump())
    stops = [r for r in caplog.records if "the trace stops, the run goes on" in r.getMessage()]
    assert len(stops) == 1
    assert writer.stopped


def test_what_a_slow_disk_loses_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_writer, "MAX_WAITING", 10)
    monkeypatch.setattr(trace_writer, "FLUSH_INTERVAL_S", 60.0)
    writer = TraceWriter(tmp_path, header(), 1 << 20, 2)
    for index in range(25):
        writer.put(attempt(f"g{index}.000", 5).model_dump())
    writer.close()
    trace = read_trace(tmp_path)
    assert len(trace.samples) == 10
    assert "15 lines were lost" in trace.notes[0]


def test_a_sample_that_goes_on_in_a_later_group_is_one_response(tmp_path: Path) -> None:
    file = write(
        tmp_path / "000001-0000.jsonl",
        header(),
        attempt("g1.000", 9),
        attempt("g1.001", 20, end="parked"),
        attempt("g2.000", 15, before=20, end="parked", continued_from="g1.001"),
        attempt("g2.001", 4),
        attempt("g2.000", 10, before=35, continued_from="g1.001", number=2),
        attempt("g3.000", 5, before=100, continued_from="g0.003"),
        ScoreLine(sample="g2.000", reward=1.0),
    )
    trace = read_trace(file)
    found = {s.sample_id: (s.group_id, s.num_tokens, s.finished, s.reward) for s in trace.samples}
    assert found == {
        "g1.000": ("g1", 9, True, None),
        "g1.001": ("g1", 45, True, 1.0),
        "g2.001": ("g2", 4, True, None),
        "g3.000": ("g3", 105, True, None),
    }, "counted once, in the group that started it; one whose start is in no file, in the group that it is found in"


def test_a_file_that_is_removed_meanwhile_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = write(tmp_path / "000001-0000.jsonl", header(), attempt("g1.000", 9))
    kept = write(tmp_path / "000001-0001.jsonl", header(), attempt("g2.000", 7))
    gone.unlink()
    monkeypatch.setattr(trace_reader, "trace_files", lambda path: [gone, kept])
    trace = read_trace(tmp_path)
    assert [s.num_tokens for s in trace.samples] == [7]
    assert "was removed while" in trace.notes[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ended_at", "NaN"),
        ("started_at", "Infinity"),
        ("before", str(1 << 62)),
        ("before", "-1"),
        ("prompt_tokens", "1e40"),
    ],
)
def test_numbers_of_no_use_are_refused_by_line(tmp_path: Path, field: str, value: str) -> None:
    line = json.dumps(attempt("g1.000", 9).model_dump() | {field: "HERE"}).replace('"HERE"', value)
    file = tmp_path / "000001-0000.jsonl"
    file.write_text(header().model_dump_json() + "\n" + line + "\n")
    with pytest.raises(DataError, match="line 2 is not a line of a trace"):
        read_trace(file)


@pytest.mark.parametrize(("field", "value"), [("admission", "magic"), ("slots", 0), ("ratio", 0.5), ("ratio", 1e9)])
def test_a_header_of_no_use_says_which_field(tmp_path: Path, field: str, value: object) -> None:
    fields = header().model_dump(mode="json")
    fields["limits"][field] = value
    file = tmp_path / "000001-0000.jsonl"
    file.write_text(json.dumps(fields) + "\n")
    with pytest.raises(DataError, match=rf"limits\.{field}"):
        read_trace(file)
