"""The trainer's own `/metrics`, on rank 0, if `trainer.metrics_port` is set.

Always true: it is answered by a thread of its own, also while a step runs for minutes; telling it something is a few
dictionary writes; there are at most MAX_NAMES names of step metrics, whatever is reported.
"""

import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Protocol

from prometheus_client import start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from protocol.collectors import process_registry
from protocol.errors import SettingsError
from protocol.settings import RunSettings
from trainer.metric_catalogue import PHASES, STEP_METRICS, TRAINER_CATALOGUE, series_name
from trainer.summary import Totals

MAX_NAMES = 1000  # a run has some two hundred; reward parts are named by users
PACKAGE = "april-rollout"
SHUTDOWN_S = 5.0  # the server looks for the end twice a second


class Exporter(Protocol):
    """Is told of steps and checkpoints."""

    def planned(self, total_steps: int, saved_step: int, totals: Totals) -> None:
        """The run will take `total_steps`, and goes on from a checkpoint of `saved_step` (0: anew) with `totals`."""
        ...

    def trained(self, step: int, metrics: Mapping[str, float], totals: Totals) -> None:
        """A step is trained; `totals` are the run's, so far."""
        ...

    def saved(self, step: int, seconds: float) -> None:
        """A checkpoint is whole."""
        ...

    def close(self) -> None:
        """Stop answering."""
        ...


class NoExporter:
    """Implements `Exporter` where nobody asked for one."""

    def planned(self, total_steps: int, saved_step: int, totals: Totals) -> None:
        """Nothing."""

    def trained(self, step: int, metrics: Mapping[str, float], totals: Totals) -> None:
        """Nothing."""

    def saved(self, step: int, seconds: float) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class PrometheusExporter(Collector):
    """Implements `Exporter` by a small HTTP server."""

    def __init__(self, run: str, host: str, port: int) -> None:
        self._registry = process_registry()
        self._values: dict[str, float] = {}
        self._now: dict[str, float] = {
            "april_trainer_step": 0,
            "april_trainer_total_steps": 0,
            "april_trainer_saved_step": 0,
            "april_trainer_last_step_timestamp_seconds": 0,
        }
        self._info = {(run, version(PACKAGE)): 1.0}
        self._before = Totals()
        catalogue, registry = TRAINER_CATALOGUE, self._registry
        self._steps = catalogue.counter("april_trainer_steps_total", registry)
        self._tokens = catalogue.counter("april_trainer_tokens_total", registry)
        self._samples = catalogue.counter("april_trainer_samples_total", registry)
        self._nonfinite = catalogue.counter("april_trainer_nonfinite_updates_total", registry)
        self._publish_failures = catalogue.counter("april_trainer_publish_failures_total", registry)
        self._step_s = catalogue.histogram("april_trainer_step_seconds", registry)
        phases = catalogue.histogram("april_trainer_phase_seconds", registry)
        self._phases = {phase: phases.labels(phase) for phase in PHASES}
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise SettingsError(
                f"the trainer's metrics can't be served on {host}:{port} ({error.strerror or error}): stop what uses "
                "it, or set trainer.metrics_port to another port or to 0"
            ) from error

    def planned(self, total_steps: int, saved_step: int, totals: Totals) -> None:
        """See `Exporter`."""
        self._before = totals.model_copy()
        self._now |= {
            "april_trainer_total_steps": total_steps,
            "april_trainer_saved_step": saved_step,
            "april_trainer_step": saved_step,
        }

    def trained(self, step: int, metrics: Mapping[str, float], totals: Totals) -> None:
        """See `Exporter`."""
        self._steps.inc()
        self._tokens.inc(metrics.get("tokens/trained", 0))
        self._samples.inc(metrics.get("samples/trained", 0))
        self._count(totals)
        if (seconds := metrics.get("timing_s/step")) is not None:
            self._step_s.observe(seconds)
        for phase, child in self._phases.items():
            if (seconds := metrics.get(f"timing_s/{phase}")) is not None:
                child.observe(seconds)
        known = self._values
        new = {name: value for name, value in metrics.items() if name not in known}
        room = max(0, MAX_NAMES - len(known))
        # A new object, since the server's thread may be reading the old one.
        self._values = {name: metrics.get(name, value) for name, value in known.items()} | dict([*new.items()][:room])
        self._now |= {"april_trainer_step": step, "april_trainer_last_step_timestamp_seconds": time.time()}

    def saved(self, step: int, seconds: float) -> None:
        """See `Exporter`."""
        self._phases["save"].observe(seconds)
        self._now["april_trainer_saved_step"] = step

    def close(self) -> None:
        """See `Exporter`."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(SHUTDOWN_S)

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        catalogue, values = TRAINER_CATALOGUE, self._values
        yield catalogue.family("april_trainer_up", 1)
        yield catalogue.family("april_trainer_info", self._info)
        for name, value in list(self._now.items()):
            yield catalogue.family(name, value)
        for name in STEP_METRICS:
            yield catalogue.family(series_name(name), {(): values[name]} if name in values else {})
        yield catalogue.family("april_trainer_step_metric", {(name,): value for name, value in values.items()})

    def _count(self, totals: Totals) -> None:
        """Totals are the run's: what this process added is the difference."""
        self._nonfinite.inc(max(0, totals.nan_skips - self._before.nan_skips))
        self._publish_failures.inc(max(0, totals.publish_failures - self._before.publish_failures))
        self._before = totals.model_copy()


def open_exporter(settings: RunSettings) -> Exporter:
    """What `trainer.metrics_port` asks for; raises `SettingsError` if the port is taken."""
    trainer = settings.trainer
    if not trainer.metrics_port:
        return NoExporter()
    return PrometheusExporter(settings.run.name, trainer.metrics_host, trainer.metrics_port)
