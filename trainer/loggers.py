"""Where step metrics go: console, JSONL, TensorBoard, behind one small protocol."""

import json
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.logging import RichHandler

from protocol.settings import RunSettings

METRICS_NAME = "metrics.jsonl"
COLUMNS: Mapping[str, str] = {
    "reward/mean": "reward {:.3f}",
    "response/length_mean": "len {:.0f}",
    "response/stopped_share": "stop {:.0%}",
    "lag/mean": "lag {:.2f}",
    "off_policy/token_share": "off {:.0%}",
    "importance/ess": "ess {:.3f}",
    "actor/entropy": "ent {:.3f}",
    "actor/grad_norm": "grad {:.3f}",
    "timing_s/wait": "wait {:.1f}s",
    "timing_s/step": "step {:.1f}s",
    "eval/reward": "eval {:.3f}",
}


class MetricLogger(Protocol):
    """Takes the metrics of one step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record `metrics` of `step`."""
        ...

    def close(self) -> None:
        """Flush and let go."""
        ...


class ConsoleLogger:
    """One line a step on a terminal, one JSON line a step otherwise."""

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        self._total = total_steps
        self._console = console or Console()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the columns that people watch; a pipe gets everything."""
        if not self._console.is_terminal:
            print(_json_line(step, metrics), file=self._console.file, flush=True)
            return
        parts = [text.format(metrics[name]) for name, text in COLUMNS.items() if name in metrics]
        width = len(str(self._total))
        share = step / self._total if self._total else 1
        self._console.print(
            f"[bold]{step:>{width}}/{self._total}[/] [dim]{share:4.0%}[/]  " + "  ".join(parts), highlight=False
        )

    def close(self) -> None:
        """Nothing is held."""


class JsonlLogger:
    """One JSON object a step, appended to a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line."""
        self._file.write(_json_line(step, metrics) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorboardLogger:
    """Scalars for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar a metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def make_loggers(settings: RunSettings, total_steps: int) -> list[MetricLogger]:
    """Those that `trainer.logger` names."""
    makers: dict[str, Any] = {
        "console": lambda: ConsoleLogger(total_steps),
        "jsonl": lambda: JsonlLogger(settings.trainer_dir / METRICS_NAME),
        "tensorboard": lambda: TensorboardLogger(settings.trainer_dir / "tensorboard"),
    }
    return [makers[name]() for name in settings.trainer.logger]


def set_up_messages() -> None:
    """Messages of the trainer on standard error: coloured on a terminal, JSON lines otherwise."""
    logger = logging.getLogger("april.trainer")
    if logger.handlers:
        return
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if sys.stderr.isatty():
        logger.addHandler(RichHandler(console=Console(stderr=True), show_path=False))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(_JsonFormatter())
        logger.addHandler(handler)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"at": record.created, "level": record.levelname.lower(), "message": record.getMessage()}
        return json.dumps(line)


def _json_line(step: int, metrics: Mapping[str, float]) -> str:
    return json.dumps({"step": step, "at": round(time.time(), 3), **metrics})
