"""What a metric is, before a library makes one of it: the catalogues of the service and of the trainer are made of it.

Always true: a name starts with `april_`, and of its labels every value comes from a closed or bounded set (states,
reasons, replicas, scorers, lags up to a most), so that a run that lasts for weeks has no more series than a new one.
"""

from dataclasses import dataclass
from enum import StrEnum

# From a hundredth of a second to eight hours: rounds and installs of large models last that long.
SECONDS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 180, 600, 1800, 3600, 7200, 14400, 28800)
# Fractions of a millisecond matter for what happens to each sample.
SHORT_SECONDS_BUCKETS = (0.001, 0.003, *SECONDS_BUCKETS)
# Powers of two up to half a million: contexts of a million tokens are the next thing.
TOKEN_BUCKETS = tuple(float(1 << power) for power in range(4, 20))
SHARE_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
# Of things of which most have none or a few.
COUNT_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536)


class MetricKind(StrEnum):
    """How a metric's values go on."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. `name` is what queries say: that of a counter ends in `_total`. `worry`: when to, if ever."""

    name: str
    kind: MetricKind
    text: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    worry: str = ""

    def __post_init__(self) -> None:
        assert self.name.startswith("april_"), self.name
        assert (self.kind is MetricKind.COUNTER) == self.name.endswith("_total"), self.name
        assert (self.kind is MetricKind.HISTOGRAM) == bool(self.buckets), self.name

    @property
    def series(self) -> tuple[str, ...]:
        """Names of the series that Prometheus keeps of it."""
        if self.kind is MetricKind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "count", "sum"))
        return (self.name,)


@dataclass(frozen=True, slots=True)
class MetricSection:
    """Metrics that are read together, under one heading."""

    title: str
    metrics: tuple[MetricSpec, ...]


def counter(name: str, text: str, unit: str = "", labels: tuple[str, ...] = (), worry: str = "") -> MetricSpec:
    """A number that only grows, but for restarts."""
    return MetricSpec(name, MetricKind.COUNTER, text, unit, labels, worry=worry)


def gauge(name: str, text: str, unit: str = "", labels: tuple[str, ...] = (), worry: str = "") -> MetricSpec:
    """A number that goes up and down."""
    return MetricSpec(name, MetricKind.GAUGE, text, unit, labels, worry=worry)


def histogram(
    name: str,
    text: str,
    unit: str,
    buckets: tuple[float, ...],
    labels: tuple[str, ...] = (),
    worry: str = "",
) -> MetricSpec:
    """A distribution."""
    return MetricSpec(name, MetricKind.HISTOGRAM, text, unit, labels, buckets, worry)
