"""Spans that tests look at: in memory, and as a receiver of OTLP/HTTP gets them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from protocol.otel import Tracing
from protocol.span_ids import SpanIds


class MemoryTracing(Tracing):
    """Spans that are kept as soon as they are told."""

    def __init__(self) -> None:
        self.memory = InMemorySpanExporter()
        super().__init__("test", [SimpleSpanProcessor(self.memory)])

    def named(self, name: str) -> list[ReadableSpan]:
        """Those of a name, in the order in which they were told."""
        return [span for span in self.memory.get_finished_spans() if span.name == name]


def ids_of(span: ReadableSpan) -> SpanIds:
    """What names it."""
    assert span.context is not None
    return SpanIds(span.context.trace_id, span.context.span_id)


def parent_ids(span: ReadableSpan) -> SpanIds | None:
    """What names its parent."""
    return None if span.parent is None else SpanIds(span.parent.trace_id, span.parent.span_id)


@dataclass
class Receiver:
    """What came in."""

    url: str = ""
    requests: list[tuple[str, ExportTraceServiceRequest]] = field(default_factory=list)

    @property
    def spans(self) -> list[tuple[str, Span]]:
        """Each span with the name of its process."""
        return [
            (
                resource.resource.attributes[_index(resource.resource.attributes, "service.name")].value.string_value,
                span,
            )
            for _, request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def _index(attributes: Any, key: str) -> int:
    return next(number for number, attribute in enumerate(attributes) if attribute.key == key)


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver of OTLP/HTTP on loopback."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_POST(self) -> None:
            request = ExportTraceServiceRequest()
            request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            receiver.requests.append((self.path, request))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
