"""OpenTelemetry: ids that two processes agree on, spans with their times, exports, and nothing when it is off."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from protocol import logs, tracing
from protocol.errors import SettingsError
from protocol.otel import Tracing
from protocol.settings.observing import TracingSettings
from protocol.span_ids import SpanEvent, SpanIds, new_ids, parent_of, step_ids
from protocol.tracing import check_tracing, open_tracing
from tests.support.spans import MemoryTracing, ids_of, parent_ids, receiving

EPOCH = 1_800_000_000.0


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_process", {})


def test_the_ids_of_a_step_are_the_same_in_every_process_and_differ_between_steps() -> None:
    assert step_ids("run", 2, 7) == step_ids("run", 2, 7)
    assert len({step_ids(*words) for words in (("run", 2, 7), ("run", 2, 8), ("run", 3, 7), ("ru", 2, 7))}) == 4
    assert parent_of(step_ids("run", 2, 7).traceparent) == step_ids("run", 2, 7)


@pytest.mark.parametrize(
    "header",
    [None, "", "x", f"00-{'0' * 32}-{'1' * 16}-01", f"00-{'1' * 32}-{'0' * 16}-01", f"01-{'1' * 32}-{'1' * 16}-01",
     f"00-{'1' * 32}-{'1' * 16}", f"00-{'G' * 32}-{'1' * 16}-01"],
)  # fmt: skip
def test_a_header_that_is_not_of_the_standard_is_no_parent(header: str | None) -> None:
    assert parent_of(header) is None


def test_a_span_is_told_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = MemoryTracing()
    logs.bind_process(run="r", service_epoch=3)
    root, link = new_ids(), new_ids()
    child = traces.span(
        "child", EPOCH, EPOCH + 2.5, {"round": 4, "left": None}, parent=root, links=[link],
        events=[SpanEvent("cut", EPOCH + 1, {"n": 1})], error="lost",
    )  # fmt: skip
    traces.span("root", EPOCH - 1, EPOCH + 3, {}, ids=root)
    (told,), (above,) = traces.named("child"), traces.named("root")
    assert ids_of(told) == child
    assert parent_ids(told) == ids_of(above) == root
    assert above.parent is None
    assert told.start_time == int(EPOCH * 1e9)
    assert told.end_time == int((EPOCH + 2.5) * 1e9)
    assert dict(told.attributes or {}) == {"run": "r", "service_epoch": 3, "round": 4}
    assert [(e.name, e.timestamp) for e in told.events] == [("cut", int((EPOCH + 1) * 1e9))]
    assert [SpanIds(i.context.trace_id, i.context.span_id) for i in told.links] == [link]
    assert told.status.description == "lost"


def test_a_span_that_a_library_left_open_is_nobodys_parent() -> None:
    from opentelemetry.sdk.trace import TracerProvider

    traces = MemoryTracing()
    with TracerProvider(shutdown_on_exit=False).get_tracer("library").start_as_current_span("open"):
        traces.span("ours", EPOCH, EPOCH, {})
    assert traces.named("ours")[0].parent is None


def test_a_clock_that_ran_back_makes_no_negative_span() -> None:
    traces = MemoryTracing()
    traces.span("x", EPOCH, EPOCH - 5, {})
    (told,) = traces.named("x")
    assert told.start_time == told.end_time


def test_a_receiver_gets_the_spans(caplog: pytest.LogCaptureFixture) -> None:
    with receiving() as receiver:
        for endpoint in (receiver.url, f"{receiver.url}/v1/traces"):
            made = open_tracing(TracingSettings(endpoint=endpoint), "april-test")
            assert made is not None
            made.span("one", EPOCH, EPOCH + 1, {"step": 1}, ids=step_ids("r", 1, 1))
            made.close()
    assert [path for path, _ in receiver.requests] == ["/v1/traces"] * 2
    assert [(process, span.name, span.trace_id.hex()) for process, span in receiver.spans] == [
        ("april-test", "one", f"{step_ids('r', 1, 1).trace_id:032x}")
    ] * 2
    assert not caplog.records


def test_a_receiver_that_is_away_costs_a_line_and_not_the_process(caplog: pytest.LogCaptureFixture) -> None:
    made = open_tracing(TracingSettings(endpoint="http://127.0.0.1:1"), "april-test")
    assert made is not None
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            made.span(f"lost-{number}", EPOCH, EPOCH, {})
            made.flush()
        made.close()
    assert len([r for r in caplog.records if r.name.startswith("opentelemetry")]) == 1


def test_processes_share_a_file_of_whole_otlp_lines(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "spans.jsonl"
    both = [open_tracing(TracingSettings(file=path), name) for name in ("april-service", "april-trainer")]
    ids = step_ids("r", 1, 1)
    for number, made in enumerate(both):
        assert isinstance(made, Tracing)
        made.span("x", EPOCH, EPOCH + 1, {"step": number}, parent=ids, links=[ids])
        made.flush()
        made.span("y", EPOCH, EPOCH + 1, {"groups": ["a", "b"]})
        made.close()
    resources = [r for line in path.read_text().splitlines() for r in json.loads(line)["resourceSpans"]]
    spans = [span for r in resources for scope in r["scopeSpans"] for span in scope["spans"]]
    assert len(spans) == 4
    (first,) = [s for s in spans if s["name"] == "x"][:1]
    assert first["traceId"] == f"{ids.trace_id:032x}"
    assert first["parentSpanId"] == f"{ids.span_id:016x}" == first["links"][0]["spanId"]
    assert first["startTimeUnixNano"] == str(int(EPOCH * 1e9))
    assert isinstance(first["kind"], int)


def test_mistakes_are_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="name another"):
        open_tracing(TracingSettings(file=tmp_path / "file" / "spans"), "x")
    with pytest.raises(ValueError, match="no OTLP/HTTP address"):
        TracingSettings(endpoint="localhost:4317")
    monkeypatch.setattr(tracing, "PACKAGES", ("opentelemetry.no_such_part", "no_such_package.at_all"))
    check_tracing(TracingSettings())
    with pytest.raises(SettingsError, match=r"pip install 'april-rollout\[tracing\]'"):
        open_tracing(TracingSettings(endpoint="http://127.0.0.1:4318"), "x")


def test_off_imports_nothing_of_opentelemetry() -> None:
    script = (
        "import sys; import rollout_service.spans, trainer.step_spans, trainer.client\n"
        "from protocol.tracing import open_tracing\n"
        "from protocol.settings import RunSettings\n"
        "from trainer.step_spans import StepSpans\n"
        "assert open_tracing(RunSettings().tracing, 'x') is None\n"
        "spans = StepSpans(RunSettings(), True)\n"
        "with spans.part('update', 1): pass\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
