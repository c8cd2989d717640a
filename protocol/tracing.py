"""OpenTelemetry spans of both processes, if `tracing` switches them on; else nothing of OpenTelemetry is imported.

Always true:
- spans are told when they are over, with the times they had: nothing is held open over a wait, so a process that dies
  leaves whole spans or none;
- a span carries what every log line carries (run, service_epoch, trainer_epoch), and its ids have the names that logs
  and the trace on disk give them: round, group, sample, attempt, version, step;
- the ids of a step's span follow from run, trainer epoch and step alone. So the trainer can name it in a call that it
  makes before the step begins, and the service's spans of that call (the lease of its batch) belong to the step;
- exporting is a thread's work; a receiver that is away costs spans and a line a minute, nothing else.
"""

import hashlib
import importlib.util
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from protocol.errors import SettingsError
from protocol.settings.observing import TracingSettings

if TYPE_CHECKING:
    from protocol.otel import Tracing

PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
TRACEPARENT = "traceparent"
PARENT_PATTERN = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}")

Value = str | int | float | bool | Sequence[str]


class SpanIds(NamedTuple):
    """Names a span."""

    trace_id: int
    span_id: int

    @property
    def traceparent(self) -> str:
        """The same for a header, as W3C Trace Context writes it; sampled."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"


class SpanEvent(NamedTuple):
    """Something that happened within a span, at a time in seconds since the epoch."""

    name: str
    at: float
    attributes: Mapping[str, Value]


def step_ids(run: str, trainer_epoch: int, step: int) -> SpanIds:
    """The ids of the span of one step of the trainer."""
    digest = hashlib.blake2b(f"{run}\0{trainer_epoch}\0{step}".encode(), digest_size=24).digest()
    return SpanIds(int.from_bytes(digest[:16], "big") or 1, int.from_bytes(digest[16:], "big") or 1)


def new_ids(trace_id: int | None = None) -> SpanIds:
    """Ids of a span that is yet to be told of, in a trace of its own unless one is given."""
    return SpanIds(trace_id or secrets.randbits(128) or 1, secrets.randbits(64) or 1)


def parent_of(header: str | None) -> SpanIds | None:
    """The ids in a `traceparent` header; None for none, or one that is not of the standard."""
    found = PARENT_PATTERN.fullmatch(header.strip()) if header else None
    return SpanIds(int(found[1], 16), int(found[2], 16)) if found else None


def check_tracing(settings: TracingSettings) -> None:
    """Raise SettingsError if spans are switched on and can't be made here."""
    if settings.on and not all(map(_is_installed, PACKAGES)):
        raise SettingsError(
            "tracing.endpoint and tracing.file need OpenTelemetry, which is not installed: "
            "pip install 'april-rollout[tracing]', or leave them out"
        )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False


def open_tracing(settings: TracingSettings, process: str) -> "Tracing | None":
    """What makes the spans of this process, or None if they are off. Raises SettingsError if it can't be."""
    if not settings.on:
        return None
    check_tracing(settings)
    from protocol.otel import Tracing, make_processors

    return Tracing(process, make_processors(settings))
