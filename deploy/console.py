"""How the commands speak: rich on a terminal, JSON lines otherwise; errors as one sentence."""

import json
import logging
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.logging import RichHandler

from protocol.errors import AprilError

NOISY = ("httpx", "httpcore", "uvicorn", "deepspeed", "DeepSpeed")  # each logs a line a request or a step


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record with its time in seconds since the epoch."""
        entry = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure_logging(level: int = logging.INFO) -> None:
    """Log to standard error, for people on a terminal and for programs otherwise."""
    handler: logging.Handler
    if sys.stderr.isatty():
        handler = RichHandler(console=Console(stderr=True), show_path=False, rich_tracebacks=False)
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], format="%(message)s", force=True)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)


def run_reporting_errors(work: Callable[[], None]) -> None:
    """Run `work`; end the process with a sentence and the error's exit code if it raises one of ours."""
    try:
        work()
    except* AprilError as group:
        errors = list(_leaves(group))
        for error in errors:
            print(f"april: {error}", file=sys.stderr)
        sys.exit(errors[0].exit_code)


def _leaves(group: BaseExceptionGroup[AprilError]) -> Iterator[AprilError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
