"""What the trainer's side of the API tells: deliveries, their lags, long polls, and the trainer's own step metrics.

Always true: the trainer's metrics are at most MAX_NAMES series, whatever a trainer sends; the wait of a step counts
once in a session, since a trainer that heard no answer sends it again.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from protocol.samples import Group
from rollout_service.metrics.catalogue import SERVICE_CATALOGUE

MAX_LAG_LABEL = 16  # versions that have a series of their own; a run with more is broken, and `more` says so
MORE = "more"
LAG_LABELS = (*map(str, range(MAX_LAG_LABEL + 1)), MORE)
MAX_NAMES = 1000  # a run has some two hundred; a trainer that names metrics after prompts must not fill Prometheus
WAIT_METRIC = "timing_s/wait"
DRIFT_METRIC = "mismatch/lag0_mean"


class DeliveryMetrics(Collector):
    """Of one service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        waits = SERVICE_CATALOGUE.histogram("april_delivery_wait_seconds", registry)
        self._waits = {answered: waits.labels("batch" if answered else "none") for answered in (True, False)}
        deliveries = SERVICE_CATALOGUE.counter("april_deliveries_total", registry)
        self._first, self._replay = deliveries.labels("first"), deliveries.labels("replay")
        tokens = SERVICE_CATALOGUE.counter("april_batch_tokens_total", registry)
        self._tokens = [tokens.labels(name) for name in LAG_LABELS]
        self._idle_s = SERVICE_CATALOGUE.counter("april_trainer_idle_seconds_total", registry)
        self._counted = (0, -1.0)  # trainer epoch and step of the last wait that is counted
        self._reported: dict[str, float] = {}
        registry.register(self)

    def polled(self, waited_s: float, answered: bool) -> None:
        """A long poll was answered, with a batch or without."""
        self._waits[answered].observe(waited_s)

    def delivered(self, policy_version: int, groups: Sequence[Group]) -> None:
        """A batch is sent for the first time, to a trainer that will hold `policy_version` when it trains on it."""
        self._first.inc()
        counts = np.zeros(len(LAG_LABELS), np.int64)
        for group in groups:
            for sample in group.samples:
                for segment in sample.segments:
                    lag = min(max(0, policy_version - segment.version), MAX_LAG_LABEL + 1)
                    counts[lag] += len(segment.tokens)
        for child, count in zip(self._tokens, counts.tolist(), strict=True):
            if count:
                child.inc(count)

    def replayed(self) -> None:
        """A batch is sent again, as it was."""
        self._replay.inc()

    def reported(self, metrics: Mapping[str, float], trainer_epoch: int) -> None:
        """The trainer's metrics of a step, its number among them; sent again, its wait counts no second time."""
        waited_s, place = metrics.get(WAIT_METRIC), (trainer_epoch, metrics["step"])
        if waited_s is not None and place > self._counted:
            self._counted = place
            self._idle_s.inc(max(0.0, waited_s))
        for name, value in metrics.items():
            if name in self._reported or len(self._reported) < MAX_NAMES:
                self._reported[name] = value

    def collect(self) -> Iterator[Metric]:
        """The last value of each of the trainer's metrics."""
        values = {(name,): value for name, value in self._reported.items()}
        yield SERVICE_CATALOGUE.family("april_trainer_metric", values)
        drift = self._reported.get(DRIFT_METRIC)
        yield SERVICE_CATALOGUE.family("april_engine_drift", {} if drift is None else {(): drift})
