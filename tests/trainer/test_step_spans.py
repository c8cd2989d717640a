"""Spans of a whole training: a step with its parts, and calls that name the step before it begins."""

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request

from protocol.settings import RunSettings
from protocol.span_ids import TRACEPARENT, parent_of, step_ids
from tests.trainer.fake_service import FakeService
from trainer.main import train

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Path and `traceparent` of each call of the trainer's session."""
    calls: list[tuple[str, str | None]] = []
    fence = FakeService.fence

    def watched(self: FakeService, request: Request) -> None:
        calls.append((request.url.path, request.headers.get(TRACEPARENT)))
        fence(self, request)

    monkeypatch.setattr(FakeService, "fence", watched)
    return calls


def _told(path: Path) -> list[dict[str, Any]]:
    resources = [resource for line in path.read_text().splitlines() for resource in json.loads(line)["resourceSpans"]]
    return [span for resource in resources for scope in resource["scopeSpans"] for span in scope["spans"]]


def _attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {a["key"]: next(iter(a["value"].values())) for a in span["attributes"]}


def test_a_step_holds_its_parts_and_its_calls(
    service: FakeService, settings: RunSettings, called: list[tuple[str, str | None]], tmp_path: Path
) -> None:
    path = tmp_path / "spans.jsonl"
    traced = settings.tracing.model_copy(update={"file": path})
    train(settings.model_copy(update={"tracing": traced}))
    told = _told(path)
    steps = {int(_attributes(span)["step"]): span for span in told if span["name"] == "step"}
    assert sorted(steps) == [1, 2, 3]
    for step, span in steps.items():
        ids = step_ids(settings.run.name, 1, step)
        assert (span["traceId"], span["spanId"]) == (f"{ids.trace_id:032x}", f"{ids.span_id:016x}")
        assert "parentSpanId" not in span
        attributes = _attributes(span)
        assert attributes["trainer_epoch"] == "1"
        assert attributes["run"] == settings.run.name
        assert len(attributes["groups"]["values"]) == 4
        assert "reward/mean" in attributes
        parts = [other for other in told if other.get("parentSpanId") == span["spanId"]]
        names = {part["name"] for part in parts}
        assert {"wait", "update", "publish"} <= names
        assert ("save" in names) == (step in (2, 3))
        assert all(int(part["startTimeUnixNano"]) <= int(part["endTimeUnixNano"]) for part in parts)
    leases = [parent_of(header) for path, header in called if path == "/v1/batches"]
    assert leases == [step_ids(settings.run.name, 1, step) for step in (1, 2, 3)]
    acks = {path: parent_of(header) for path, header in called if path.endswith("/ack")}
    assert acks == {f"/v1/batches/{step}/ack": step_ids(settings.run.name, 1, step) for step in (2, 3)}
    assert all(header for path, header in called if path in ("/v1/policies", "/v1/trainers/metrics"))


def test_without_tracing_calls_name_no_span(
    service: FakeService, settings: RunSettings, called: list[tuple[str, str | None]]
) -> None:
    train(settings)
    assert called
    assert {header for _, header in called} == {None}
