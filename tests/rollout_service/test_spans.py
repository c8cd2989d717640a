"""Spans of the service: rounds over attempts, links over resumes, calls of a trainer; on the simulated engine."""

from pathlib import Path

import httpx
import pytest

from protocol.span_ids import TRACEPARENT, step_ids
from rollout_service import spans
from rollout_service.spans import ServiceSpans, TracedCalls
from rollout_service.tuning.trace_open import open_trace
from rollout_service.tuning.trace_reader import read_trace
from tests.support.service import running_service, service_settings
from tests.support.spans import MemoryTracing, ids_of, parent_ids

NUM_STEPS = 5


async def run_steps(tmp_path: Path, sample_share: float = 1.0) -> MemoryTracing:
    """A few steps with a trainer that says which step each call is a part of."""
    settings = service_settings(tmp_path, rollout={"n": 2, "ratio": 2.0, "lookahead": 0, "max_lag": 4})
    traces = MemoryTracing()
    recorder = open_trace(settings, 1, [ServiceSpans(traces, sample_share).put])
    async with running_service(settings, trace=recorder) as service:
        traced = TracedCalls(service.client._transport.app, traces)  # type: ignore[attr-defined]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(traced), base_url="http://test") as client:
            service.client = client
            headers = await service.open_trainer()
            for step in range(1, NUM_STEPS + 1):
                named = headers | {TRACEPARENT: step_ids("test", 1, step).traceparent}
                await service.batch(step, named)
                await service.publish(step, named)
                await client.post(f"/v1/batches/{step}/ack", headers=named)
            refused = {**headers, TRACEPARENT: step_ids("test", 1, 99).traceparent}
            assert (await client.post("/v1/batches/99/ack", headers=refused)).status_code == 409
    recorder.close()
    return traces


async def test_rounds_hold_the_attempts_that_ended_in_them_and_attempts_link_to_earlier_ones(tmp_path: Path) -> None:
    traces = await run_steps(tmp_path)
    trace = read_trace(tmp_path)
    rounds = {span.attributes["round"]: span for span in traces.named("round")}
    assert set(rounds) == {line.round for line in trace.rounds}
    for line in trace.rounds:
        span = rounds[line.round]
        assert span.start_time == int(line.started_at * 1e9)
        assert span.end_time == int(line.offered_at * 1e9)
        assert span.events[-1].name == "offered"
        assert (span.events[0].name == "cut") == (line.cut_at is not None)
        assert span.attributes["ready"] == len(line.ready_s)
        assert span.attributes["version"] == line.active_version
    attempts = {(span.attributes["sample"], span.attributes["attempt"]): span for span in traces.named("attempt")}
    num_linked = 0
    for sample in trace.samples:
        told = [attempts.pop((sample.sample_id, line.attempt)) for line in sample.attempts]
        for number, (span, line) in enumerate(zip(told, sample.attempts, strict=True)):
            assert [link.context.span_id for link in span.links] == [ids_of(before).span_id for before in told[:number]]
            assert span.attributes["end"] == line.end
            assert [event.attributes["version"] for event in span.events] == [s.version for s in line.segments]
            if line.round in rounds:
                assert parent_ids(span) == ids_of(rounds[line.round])
            num_linked += number > 0
    assert not attempts
    assert num_linked, "a ratio of 2 parks some"
    scores = traces.named("score")
    assert {span.attributes["sample"] for span in scores} == {
        s.sample_id for s in trace.samples if s.reward is not None
    }
    assert {span.attributes["version"] for span in traces.named("install")} == {line.version for line in trace.installs}


async def test_calls_of_a_trainer_belong_to_its_steps(tmp_path: Path) -> None:
    traces = await run_steps(tmp_path, sample_share=0)
    assert not traces.named("attempt")
    assert not traces.named("score")
    for name, status in (("lease", 200), ("publish", 202)):
        told = traces.named(name)
        assert [parent_ids(span) for span in told] == [step_ids("test", 1, s) for s in range(1, NUM_STEPS + 1)]
        assert all(span.attributes["http.response.status_code"] == status for span in told)
    *acks, refused = traces.named("ack")
    assert [span.attributes["step"] for span in acks] == list(range(1, NUM_STEPS + 1))
    assert refused.attributes["http.response.status_code"] == 409
    assert not traces.named("open session"), "it belongs to no step"


async def test_a_part_of_the_samples_is_traced_whole(tmp_path: Path) -> None:
    traces = await run_steps(tmp_path, sample_share=0.5)
    by_sample: dict[str, set[int]] = {}
    for span in traces.named("attempt"):
        by_sample.setdefault(span.attributes["sample"], set()).add(span.attributes["attempt"])
    trace = read_trace(tmp_path)
    wanted = {s.sample_id: {line.attempt for line in s.attempts} for s in trace.samples if s.sample_id in by_sample}
    assert by_sample == wanted
    assert 0 < len(by_sample) < len(trace.samples)


def test_what_is_remembered_of_samples_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "MAX_SAMPLES", 3)
    traces = MemoryTracing()
    sink = ServiceSpans(traces, 1.0)
    line = {"kind": "attempt", "group": "g", "prompt": "p", "source": "s", "attempt": 1, "worker": None, "round": 1}
    line |= {"waited_s": None, "started_at": 1.0, "ended_at": 2.0, "before": 0, "segments": [], "end": "lost"}
    for number in range(5):
        sink.put(line | {"sample": f"g.{number}"})
    sink.put(line | {"sample": "g.0", "attempt": 2})
    sink.put(line | {"sample": "g.4", "attempt": 2})
    assert [len(span.links) for span in traces.named("attempt")] == [0, 0, 0, 0, 0, 0, 1]
    assert traces.named("attempt")[0].status.description == "the engine or its lease was lost"
    sink.put({"kind": "score", "sample": "unknown", "reward": None, "failed": "reward_error"})
    assert not traces.named("score")
