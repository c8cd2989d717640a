"""Settings of logs and of OpenTelemetry traces, which both processes read."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from protocol.settings.base import Section

LogFormat = Literal["auto", "human", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


class LogSettings(Section):
    """What service and trainer say on standard error."""

    format: LogFormat = "auto"
    """`human`: coloured lines; `json`: one object a line; `auto`: human on a terminal, JSON otherwise."""
    level: LogLevel = "info"
    """Least important lines that are shown."""


class TracingSettings(Section):
    """OpenTelemetry spans of rounds, responses, installs and steps; off until `endpoint` or `file` is set."""

    endpoint: str | None = None
    """Address of an OTLP/HTTP receiver, such as `http://127.0.0.1:4318`; spans go to its `/v1/traces`."""
    file: Path | None = None
    """File that spans are appended to as OTLP JSON lines, by both processes."""
    sample_share: float = Field(default=1.0, ge=0, le=1)
    """Share of the responses that get spans of their own; all attempts at one response, or none of them."""

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ValueError(f"{endpoint!r} is no OTLP/HTTP address: write one such as http://127.0.0.1:4318")
        return endpoint

    @property
    def on(self) -> bool:
        """Spans are made."""
        return self.endpoint is not None or self.file is not None
