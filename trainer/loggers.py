"""Where step metrics, settings and sample tables go: a small protocol, and the trackers that need no other library.

Always true: a tracker is given the settings once, at the start, without secrets; a tracker that fails later costs its
line and a warning, never the run; steps are passed as they are, also those that are repeated after a restart.
"""

import importlib.util
import io
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

from rich.console import Console
from rich.markup import escape

from protocol.batch import Batch
from protocol.errors import SettingsError
from protocol.logs import bind_process, configure_logs, is_human, json_line, process_fields
from protocol.masking import MASK, SECRET_NAME, mask_text, secrets_of
from protocol.settings import RunSettings, dump_settings
from protocol.settings.observing import LogFormat
from trainer.sample_tables import SampleReader, SampleRow

LOG = logging.getLogger("april.trainer")

METRICS_NAME = "metrics.jsonl"
SAMPLES_NAME = "samples.jsonl"
QUIET_S = 60.0  # between two warnings about one tracker that fails
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
# What a tracker needs beyond the standard library, and the extra of this package that brings it.
LIBRARIES: Mapping[str, tuple[str, str]] = {
    "tensorboard": ("tensorboard", "trainer"),
    "wandb": ("wandb", "trackers"),
    "mlflow": ("mlflow", "trackers"),
}


class MetricLogger(Protocol):
    """One tracker."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record `metrics` of `step`."""
        ...

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Record a few samples of `step`."""
        ...

    def close(self) -> None:
        """Flush and let go."""
        ...


class ConsoleLogger:
    """One line a step for people, or one JSON line a step, as `logs.format` says."""

    def __init__(self, total_steps: int, console: Console | None = None, format_: LogFormat = "auto") -> None:
        self._total = total_steps
        self._console = console or Console()
        self._human = self._console.is_terminal if format_ == "auto" else is_human(format_)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the columns that people watch; programs get everything, and what their other lines have."""
        if not self._human:
            place = {"level": "info", "logger": LOG.name, "event": "step", "message": f"step {step} is trained"}
            line = {"at": round(time.time(), 3), **place, **process_fields(), "step": step, **metrics}
            print(json_line(line), file=self._console.file, flush=True)
            return
        parts = [text.format(metrics[name]) for name, text in COLUMNS.items() if name in metrics]
        width = len(str(self._total))
        share = step / self._total if self._total else 1
        self._console.print(
            f"[bold]{step:>{width}}/{self._total}[/] [dim]{share:4.0%}[/]  " + "  ".join(parts), highlight=False
        )

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """One shortened line a sample, on a terminal only."""
        if not self._human or not self._console.is_terminal:
            return
        for row in rows:
            text = f"  {row.reward:+.2f} {row.versions}  {' '.join(f'{row.prompt} ▸ {row.response}'.split())}"
            self._console.print(f"[dim]{escape(text)}[/]", highlight=False, no_wrap=True, overflow="ellipsis")

    def close(self) -> None:
        """Nothing is held."""


class JsonlLogger:
    """One JSON object a step, appended to a file; samples go to a file beside it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _append(path)
        self._samples_path = path.with_name(SAMPLES_NAME)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line."""
        self._file.write(_json_line(step, metrics) + "\n")
        self._file.flush()

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Append one line a sample."""
        with _append(self._samples_path) as file:
            file.writelines(json.dumps({"step": step, **asdict(row)}, ensure_ascii=False) + "\n" for row in rows)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Trackers:
    """All trackers of a run, on rank 0."""

    def __init__(self, loggers: Mapping[str, MetricLogger] | None = None, samples: SampleReader | None = None) -> None:
        self._loggers = dict(loggers or {})
        self._samples = samples
        self._warned: dict[str, float] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of `step` to each."""
        self._each(step, lambda tracker: tracker.log(step, metrics))

    def log_samples(self, step: int, batch: Batch) -> None:
        """A few samples of the batch of `step` to each, as `trainer.log_samples` says."""
        if self._samples is None or not self._loggers:
            return
        rows = self._samples.read(step, batch)
        if rows:
            self._each(step, lambda tracker: tracker.log_samples(step, rows))

    def close(self) -> None:
        """Flush each and let go."""
        self._each(None, lambda tracker: tracker.close())

    def _each(self, step: int | None, call: Callable[[MetricLogger], None]) -> None:
        for name, tracker in self._loggers.items():
            try:
                call(tracker)
            except Exception as error:
                # A full disk or a server that is away must not end a run that trains.
                self._warn(name, step, error)

    def _warn(self, name: str, step: int | None, error: Exception) -> None:
        now = time.monotonic()
        if step is not None and now - self._warned.get(name, -QUIET_S) < QUIET_S:
            return
        self._warned[name] = now
        where = "at the end" if step is None else f"at step {step}"
        LOG.warning("%s recorded nothing %s: %s; training goes on without it", name, where, error)


def open_trackers(settings: RunSettings, total_steps: int) -> Trackers:
    """Those that `trainer.logger` names; raises `SettingsError` where the library of one is missing."""
    return Trackers(_made(settings, total_steps), SampleReader(settings) if settings.trainer.log_samples else None)


def check_libraries(settings: RunSettings) -> None:
    """Raise `SettingsError` where the library of a tracker is missing; every rank can do it, before anything waits."""
    for name in settings.trainer.logger:
        module, extra = LIBRARIES.get(name, ("json", ""))
        if importlib.util.find_spec(module) is None:
            raise SettingsError(
                f"trainer.logger names {name}, which is not installed: install april-rollout[{extra}], or take it out"
            )


def make_loggers(settings: RunSettings, total_steps: int) -> list[MetricLogger]:
    """The same, one by one."""
    return list(_made(settings, total_steps).values())


def public_settings(settings: RunSettings) -> dict[str, Any]:
    """All settings by dotted name, with secrets masked: what a tracker is told of the run."""
    return dict(_flattened(dump_settings(settings)))


def set_up_messages(settings: RunSettings) -> None:
    """Messages of the trainer on standard error, as `logs` of the settings says."""
    configure_logs(settings.logs, secrets_of(settings))
    bind_process(run=settings.run.name)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        bind_process(rank=int(os.environ.get("RANK", "0")))


def _made(settings: RunSettings, total_steps: int) -> dict[str, MetricLogger]:
    check_libraries(settings)
    from trainer.trackers import MlflowLogger, TensorboardLogger, WandbLogger

    makers: dict[str, Callable[[], MetricLogger]] = {
        "console": lambda: ConsoleLogger(total_steps, format_=settings.logs.format),
        "jsonl": lambda: JsonlLogger(settings.trainer_dir / METRICS_NAME),
        "tensorboard": lambda: TensorboardLogger(settings.trainer_dir / "tensorboard", public_settings(settings)),
        "wandb": lambda: WandbLogger(settings, public_settings(settings)),
        "mlflow": lambda: MlflowLogger(settings, public_settings(settings)),
    }
    return {name: _opened(name, makers[name]) for name in dict.fromkeys(settings.trainer.logger)}


def _opened(name: str, make: Callable[[], MetricLogger]) -> MetricLogger:
    try:
        return make()
    except OSError as error:
        raise SettingsError(
            f"the tracker {name} can't be opened ({error}): move away what is there or free space, set "
            f"trainer.default_local_dir, or take {name} out of trainer.logger"
        ) from error


def _append(path: Path) -> TextIO:
    """Open to append whole lines: one that a killed process left half-written is ended first."""
    file = path.open("a+b")
    try:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    except OSError:
        file.close()
        raise
    return io.TextIOWrapper(file, encoding="utf-8")


def _flattened(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat += _flattened(cast(Mapping[str, Any], value), f"{prefix}{name}.")
        elif value is not None and SECRET_NAME.search(name):
            flat.append((f"{prefix}{name}", MASK))
        else:
            flat.append((f"{prefix}{name}", _without_url_secret(value)))
    return flat


def _without_url_secret(value: Any) -> Any:
    if isinstance(value, str):
        return mask_text(value)
    if isinstance(value, list):
        return [
            dict(_flattened(cast(Mapping[str, Any], item))) if isinstance(item, Mapping) else _without_url_secret(item)
            for item in cast(list[Any], value)
        ]
    return value


def _json_line(step: int, metrics: Mapping[str, float]) -> str:
    return json.dumps({"step": step, "at": round(time.time(), 3), **metrics})
