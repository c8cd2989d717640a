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

import importlib.util
from typing import TYPE_CHECKING

from protocol.errors import SettingsError
from protocol.settings.observing import TracingSettings

if TYPE_CHECKING:
    from protocol.otel import Tracing

PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")


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
