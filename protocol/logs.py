"""Logs of both processes, by structlog: lines for people, or one JSON object a line.

Always true:
- lines of this project, of structlog loggers and of libraries go the same way, to standard error;
- every JSON line has `at`, `level`, `logger` and `message`; a line that tells of something that programs look for has
  `event` too, and fields under the names that the trace has (round, group, sample, attempt, version, step);
- what names the process (run, service_epoch, trainer_epoch) is on every line from the moment it is known, whichever
  thread or task writes it;
- no line holds a secret: neither one of the settings, nor one that its name or its place in an address gives away.
"""

import json
import logging
import sys
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import datetime
from typing import Any, TextIO, cast

import structlog
from rich.console import Console
from rich.logging import RichHandler
from structlog.typing import EventDict, Processor

from protocol.masking import mask_text, mask_value
from protocol.settings.observing import LogFormat, LogLevel, LogSettings

NOISY = ("httpx", "httpcore", "uvicorn", "deepspeed", "DeepSpeed", "opentelemetry")  # a line a request or a step each
LEADING = ("at", "level", "logger", "event", "message")  # first in a JSON line, where people look
HIDDEN = ("color_message", "vllm_process_name")  # what uvicorn and vLLM put on records, for their own handlers
TIME_DIGITS = 3
LEVELS: Mapping[LogLevel, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

_process: dict[str, Any] = {}
_process_lock = threading.Lock()


def bind_process(**fields: Any) -> None:
    """Have `fields` on every line of this process from now on, whichever thread writes it."""
    with _process_lock:
        _process.update(fields)


def process_fields() -> dict[str, Any]:
    """What `bind_process` was given."""
    with _process_lock:
        return dict(_process)


def is_human(format_: LogFormat, stream: TextIO | None = None) -> bool:
    """Whether lines on `stream` (standard error) are for people."""
    return format_ == "human" or (format_ == "auto" and (stream or sys.stderr).isatty())


def configure_logs(settings: LogSettings | None = None, secrets: Sequence[str] = ()) -> None:
    """Log to standard error as `settings` say, instead of what an earlier call or a library has set up there."""
    settings = settings or LogSettings()
    level = LEVELS[settings.level]
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _Own) or type(h) is logging.StreamHandler]:
        root.removeHandler(old)
    root.addHandler(_human_handler(secrets) if is_human(settings.format) else _json_handler(secrets))
    root.setLevel(level)
    for name in NOISY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


def json_line(fields: Mapping[str, Any]) -> str:
    """One object in one line; what JSON has no form for is written as its text, as are numbers that aren't finite."""
    try:
        return json.dumps(fields, default=str, allow_nan=False, ensure_ascii=False)
    except ValueError:
        return json.dumps({name: _finite(value) for name, value in fields.items()}, default=str, ensure_ascii=False)


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and value - value != 0 else value


class _Own(logging.Handler):
    """Marks the handlers that are made here."""


class _OwnStream(_Own, logging.StreamHandler[TextIO]):
    """Plain lines."""


class _OwnRich(_Own, RichHandler):
    """Coloured lines."""


def _json_handler(secrets: Sequence[str]) -> logging.Handler:
    handler = _OwnStream(sys.stderr)
    handler.setFormatter(_formatter([_add_place, _add_process, _to_message, _Masking(secrets), _render_json]))
    return handler


def _human_handler(secrets: Sequence[str]) -> logging.Handler:
    last: list[Processor] = [_to_message, _Masking(secrets), _render_human]
    if not sys.stderr.isatty():
        handler = _OwnStream(sys.stderr)
        handler.setFormatter(_formatter([_add_place, *last]))
        return handler
    handler = _OwnRich(console=Console(stderr=True), show_path=False, rich_tracebacks=False)
    handler.setFormatter(_formatter(last))
    return handler


def _formatter(processors: Sequence[Processor]) -> logging.Formatter:
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[_foreign_to_message, structlog.stdlib.ExtraAdder(), structlog.contextvars.merge_contextvars],
        processors=processors,
    )


def _foreign_to_message(_logger: Any, _name: str, entry: EventDict) -> EventDict:
    """The text of a standard record is a message; its event, if it has one, is among its extra fields."""
    entry["message"] = entry.pop("event")
    return entry


def _to_message(_logger: Any, _name: str, entry: EventDict) -> EventDict:
    if "message" not in entry:
        entry["message"] = entry["event"]
    return entry


def _add_place(_logger: Any, _name: str, entry: EventDict) -> EventDict:
    record = cast(logging.LogRecord, entry["_record"])
    entry["at"] = round(record.created, TIME_DIGITS)
    entry["level"] = record.levelname.lower()
    entry["logger"] = record.name
    return entry


def _add_process(_logger: Any, _name: str, entry: EventDict) -> EventDict:
    return process_fields() | dict(entry)


class _Masking:
    """Takes secrets out of messages, fields and tracebacks."""

    def __init__(self, secrets: Sequence[str]) -> None:
        self._secrets = tuple(secrets)

    def __call__(self, _logger: Any, _name: str, entry: EventDict) -> EventDict:
        """The same line without secrets."""
        error = entry.pop("exc_info", None)
        shown = {name: value for name, value in entry.items() if not name.startswith("_") and name not in HIDDEN}
        masked = {name: mask_value(name, value, self._secrets) for name, value in shown.items()}
        if error:
            masked["traceback"] = mask_text(_traceback(error), self._secrets)
        return masked


def _traceback(error: Any) -> str:
    if isinstance(error, BaseException):
        error = (type(error), error, error.__traceback__)
    elif not isinstance(error, tuple):
        error = sys.exc_info()
    return logging.Formatter().formatException(cast(Any, error))


def _render_json(_logger: Any, _name: str, entry: MutableMapping[str, Any]) -> str:
    first = {name: entry.pop(name) for name in LEADING if name in entry}
    return json_line(first | dict(entry))


def _render_human(_logger: Any, _name: str, entry: MutableMapping[str, Any]) -> str:
    """The sentence; where a line has only an event's name, its fields too."""
    traceback = entry.pop("traceback", None)
    message, event = str(entry.pop("message")), entry.pop("event", None)
    place = [str(entry.pop(name)) for name in ("at", "level", "logger") if name in entry]
    if place:
        place[0] = f"{datetime.fromtimestamp(float(place[0])):%Y-%m-%d %H:%M:%S}"
    if event == message:
        message = " ".join([message, *(f"{name}={value}" for name, value in entry.items())])
    text = " ".join([*place, message])
    return f"{text}\n{traceback}" if traceback else text
