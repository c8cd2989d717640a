"""Spans of the service, from the lines of its trace and from the calls of the trainer.

Always true:
- it is a sink of trace lines: it neither waits nor raises, and runs in the event loop's thread;
- a round's span is the parent of the attempts that ended in it, though it is told last: its ids are made when the first
  of them is; an attempt links to the earlier ones of its sample that this process saw;
- what it remembers is bounded: the samples that are not scored yet, at most `MAX_SAMPLES`.
"""

import time
import zlib
from collections import OrderedDict
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.settings import RunSettings
from protocol.span_ids import TRACEPARENT, SpanEvent, SpanIds, new_ids, parent_of
from protocol.tracing import open_tracing

if TYPE_CHECKING:
    from protocol.otel import Tracing

MAX_SAMPLES = 100_000  # some tens of megabytes; groups that are dropped never say that their samples are over
ROUND_FIELDS = (
    ("active_version", "version"),
    ("num_fresh", "fresh"),
    ("num_dropped", "dropped"),
    ("surplus_groups", "surplus"),
    ("parked_samples", "parked"),
    ("bubble_share", "bubble_share"),
)
ATTEMPT_FIELDS = ("sample", "group", "prompt", "source", "attempt", "worker", "round", "waited_s", "before", "end")
# What a trainer's call is called in a trace; other routes are called by method and path.
CALLS: Mapping[tuple[str, str], str] = {
    ("POST", "/v1/trainers"): "open session",
    ("POST", "/v1/batches"): "lease",
    ("POST", "/v1/batches/{step}/ack"): "ack",
    ("POST", "/v1/trainers/steps/{step}"): "trained",
    ("POST", "/v1/policies"): "publish",
    ("POST", "/v1/trainers/metrics"): "metrics",
}


@contextmanager
def closing_tracing(settings: RunSettings) -> "Generator[Tracing | None]":
    """What makes spans while the service runs, or None; in the end all that wait are exported."""
    tracing = open_tracing(settings.tracing, "april-service")
    try:
        yield tracing
    finally:
        if tracing is not None:
            tracing.close()


class ServiceSpans:
    """Makes spans of trace lines. `sample_share`: of the samples, by their ids, that get spans of their own."""

    def __init__(self, tracing: "Tracing", sample_share: float) -> None:
        self._tracing = tracing
        self._sample_share = sample_share
        self._round: tuple[int, SpanIds] = (-1, new_ids())
        self._attempts: OrderedDict[str, list[SpanIds]] = OrderedDict()

    def put(self, line: Mapping[str, Any]) -> None:
        """Take one line of the trace."""
        match line["kind"]:
            case "attempt":
                self._attempt(line)
            case "score":
                self._score(line)
            case "round":
                self._end_round(line)
            case "install":
                attributes = {"version": line["version"]}
                self._tracing.span("install", line["started_at"], line["ended_at"], attributes)
            case _:
                pass

    def _attempt(self, line: Mapping[str, Any]) -> None:
        sample = line["sample"]
        if not self._is_chosen(sample):
            return
        segments = line["segments"]
        attributes = {name: line[name] for name in ATTEMPT_FIELDS}
        attributes["tokens"] = sum(num_tokens for _, num_tokens, _, _ in segments)
        earlier = self._attempts.pop(sample, [])
        ids = self._tracing.span(
            "attempt",
            line["started_at"],
            line["ended_at"],
            attributes,
            parent=self._round_ids(line["round"]),
            links=earlier,
            events=[
                SpanEvent("segment", start, {"version": version, "tokens": num_tokens})
                for version, num_tokens, start, _ in segments
            ],
            error="the engine or its lease was lost" if line["end"] == "lost" else None,
        )
        self._attempts[sample] = [*earlier, ids]
        if len(self._attempts) > MAX_SAMPLES:
            self._attempts.popitem(last=False)

    def _score(self, line: Mapping[str, Any]) -> None:
        """An instant: the line says when the score was there, and the scorer's own time is a metric."""
        attempts = self._attempts.pop(line["sample"], None)
        if attempts is None:
            return
        at = line.get("at") or time.time()
        attributes = {"sample": line["sample"], "reward": line["reward"], "failed": line["failed"]}
        failed = line["failed"]
        self._tracing.span("score", at, at, attributes, parent=attempts[-1], error=failed and f"no reward: {failed}")

    def _end_round(self, line: Mapping[str, Any]) -> None:
        number = line["round"]
        events = [SpanEvent("offered", line["offered_at"], {})]
        if line["cut_at"] is not None:
            events.insert(0, SpanEvent("cut", line["cut_at"], {}))
        attributes = {to: line.get(name) for name, to in ROUND_FIELDS} | {
            "round": number,
            "ready": len(line["ready_s"]),
        }
        ids = self._round_ids(number)
        self._tracing.span("round", line["started_at"], line["offered_at"], attributes, ids=ids, events=events)

    def _round_ids(self, number: int) -> SpanIds:
        if self._round[0] != number:
            self._round = (number, new_ids())
        return self._round[1]

    def _is_chosen(self, sample: str) -> bool:
        return self._sample_share >= 1 or zlib.crc32(sample.encode()) < self._sample_share * (1 << 32)


class TracedCalls:
    """ASGI middleware: a span for each call that says of which span it is a part."""

    def __init__(self, app: ASGIApp, tracing: "Tracing") -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, and tell of it when it is over."""
        headers = dict(scope.get("headers", ())) if scope["type"] == "http" else {}
        parent = parent_of(headers.get(TRACEPARENT.encode(), b"").decode("latin-1"))
        if parent is None:
            return await self._app(scope, receive, send)
        status, began = 500, time.time()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            self._tell(scope, parent, began, status)

    def _tell(self, scope: Scope, parent: SpanIds, began: float, status: int) -> None:
        method, path = scope["method"], scope["path"]
        attributes: dict[str, Any] = {"http.request.method": method, "http.response.status_code": status}
        attributes["url.path"] = path
        route = scope.get("route")
        template = getattr(route, "path", path)
        step = scope.get("path_params", {}).get("step")
        attributes["step"] = int(step) if step is not None and str(step).isdecimal() else None
        error = f"HTTP {status}" if status >= 500 else None
        name = CALLS.get((method, template), f"{method} {template}")
        self._tracing.span(name, began, time.time(), attributes, parent=parent, error=error, server=True)
