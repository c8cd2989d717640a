"""Spans by OpenTelemetry's SDK: the one module that imports it, and only `tracing.open_tracing` imports this one.

Always true: the provider is this object's own, so neither the global one nor what a library sets there matters; spans
wait in a bounded queue, and what is more than that is dropped.
"""

import base64
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from protocol.errors import SettingsError
from protocol.logs import process_fields
from protocol.settings.observing import TracingSettings
from protocol.span_ids import SpanEvent, SpanIds, Value, new_ids

log = logging.getLogger(__name__)

TRACES_PATH = "/v1/traces"  # of an OTLP/HTTP receiver
MAX_WAITING_SPANS = 1 << 16  # a cut ends thousands of attempts at once
EXPORT_INTERVAL_MS = 1000
EXPORT_TIMEOUT_S = 5.0  # a receiver that hangs holds up the end of the process for about this long
QUIET_S = 60.0  # between two lines on a receiver that is away
NS_PER_S = 1_000_000_000
ID_FIELDS = ("traceId", "spanId", "parentSpanId")  # hexadecimal in OTLP's JSON, base64 in protobuf's


class Tracing:
    """Makes the spans of one process. Threads may share it."""

    def __init__(self, process: str, processors: Sequence[SpanProcessor]) -> None:
        self._ids = _GivenIds()
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": process}), id_generator=self._ids, shutdown_on_exit=False
        )
        for processor in processors:
            self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("april")
        self._lock = threading.Lock()

    def span(
        self,
        name: str,
        start: float,
        end: float,
        attributes: Mapping[str, Value | None],
        ids: SpanIds | None = None,
        parent: SpanIds | None = None,
        links: Sequence[SpanIds] = (),
        events: Sequence[SpanEvent] = (),
        error: str | None = None,
        server: bool = False,
    ) -> SpanIds:
        """Tell of a span that is over; times are seconds since the epoch. Attributes that are None are left out.

        `ids`: those that others were told before; they are in the trace of `parent`, if there is one.
        """
        ids = ids or new_ids(parent.trace_id if parent else None)
        known = {key: value for key, value in (process_fields() | dict(attributes)).items() if value is not None}
        # An empty context otherwise: a span that some library left open must not be taken for the parent.
        context = Context() if parent is None else set_span_in_context(NonRecordingSpan(_remote(parent)), Context())
        with self._lock:
            self._ids.next = ids
            span = self._tracer.start_span(
                name,
                context,
                SpanKind.SERVER if server else SpanKind.INTERNAL,
                known,
                [Link(_remote(link)) for link in links],
                int(start * NS_PER_S),
            )
        for event in events:
            span.add_event(event.name, dict(event.attributes), int(event.at * NS_PER_S))
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(int(max(start, end) * NS_PER_S))
        return ids

    def flush(self) -> None:
        """Export what waits."""
        self._provider.force_flush()

    def close(self) -> None:
        """Export what waits, and stop."""
        self._provider.shutdown()


class _GivenIds(IdGenerator):
    """Gives out the ids that were set before each span."""

    def __init__(self) -> None:
        self.next = new_ids()

    def generate_trace_id(self) -> int:
        """Of a span without a parent."""
        return self.next.trace_id

    def generate_span_id(self) -> int:
        """Of every span."""
        return self.next.span_id


class SpanFile(SpanExporter):
    """Appends OTLP JSON lines, as a collector's file receiver reads them.

    Always true: each line is one write to a file that is opened for appending, so processes may share one.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise SettingsError(
                f"can't write spans to tracing.file = {path} ({error.strerror}); name another"
            ) from error
        self._path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """One line of all `spans`; a disk that is full or gone costs them and a line in the log."""
        if self._file is None:
            return SpanExportResult.FAILURE
        request = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
        for ids in _with_ids(request):
            ids.update({name: base64.b64decode(ids[name]).hex() for name in ID_FIELDS if name in ids})
        try:
            os.write(self._file, json.dumps(request, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            log.warning("%d spans were not written to %s (%s)", len(spans), self._path, error.strerror)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def make_processors(settings: TracingSettings) -> list[SpanProcessor]:
    """What exports to where the settings say. Raises SettingsError for a file that can't be written."""
    exporters: list[SpanExporter] = []
    if settings.file is not None:
        exporters.append(SpanFile(settings.file))
    if settings.endpoint is not None:
        address = settings.endpoint.rstrip("/")
        address = address if address.endswith(TRACES_PATH) else address + TRACES_PATH
        exporters.append(OTLPSpanExporter(endpoint=address, timeout=EXPORT_TIMEOUT_S))
        _keep_quiet()
    return [
        BatchSpanProcessor(exporter, max_queue_size=MAX_WAITING_SPANS, schedule_delay_millis=EXPORT_INTERVAL_MS)
        for exporter in exporters
    ]


class _Quiet(logging.Filter):
    """Lets a line through each `QUIET_S`: a receiver that is away fails every second."""

    def __init__(self) -> None:
        super().__init__()
        self._told = -QUIET_S

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is shown."""
        now = time.monotonic()
        if now - self._told < QUIET_S:
            return False
        self._told = now
        record.exc_info = None  # a trace of a library's threads says nothing to whoever runs the receiver
        return True


def _keep_quiet() -> None:
    """Both say it when an export fails; filters of a parent's logger are not asked."""
    quiet = _Quiet()
    for kind in (OTLPSpanExporter, BatchSpanProcessor):
        logging.getLogger(kind.__module__).addFilter(quiet)
    logging.getLogger("opentelemetry.sdk._shared_internal").addFilter(quiet)
    logging.getLogger("opentelemetry.exporter.otlp.common._http").addFilter(quiet)


def _with_ids(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every object of an export request that holds ids."""
    for resource in request.get("resourceSpans", ()):
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                yield span
                yield from span.get("links", ())


def _remote(ids: SpanIds) -> SpanContext:
    return SpanContext(ids.trace_id, ids.span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
