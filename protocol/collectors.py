"""Collectors of `prometheus_client`, made from a catalogue: no name, type or label is written twice.

Always true: collectors go into the registry that they are made for and never into the library's global one, so that two
services in one process (as in tests) don't share counts.
"""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from protocol.metric_spec import MetricKind, MetricSection, MetricSpec

Families = GaugeMetricFamily | CounterMetricFamily


class Catalogue:
    """The metrics of one process, by name."""

    def __init__(self, sections: Sequence[MetricSection]) -> None:
        self.sections = tuple(sections)
        self._specs: Mapping[str, MetricSpec] = {m.name: m for section in sections for m in section.metrics}
        assert len(self._specs) == sum(len(section.metrics) for section in sections), "a name is there twice"

    def __iter__(self) -> Iterator[MetricSpec]:
        return iter(self._specs.values())

    def __getitem__(self, name: str) -> MetricSpec:
        return self._specs[name]

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    @property
    def series(self) -> frozenset[str]:
        """Every name that a query may use."""
        return frozenset(name for spec in self._specs.values() for name in spec.series)

    def counter(self, name: str, registry: CollectorRegistry) -> Counter:
        """A counter that is told what happens."""
        spec = self._of(name, MetricKind.COUNTER)
        return Counter(spec.name, spec.text, spec.labels, registry=registry)

    def gauge(self, name: str, registry: CollectorRegistry) -> Gauge:
        """A gauge that is set."""
        spec = self._of(name, MetricKind.GAUGE)
        return Gauge(spec.name, spec.text, spec.labels, registry=registry)

    def histogram(self, name: str, registry: CollectorRegistry) -> Histogram:
        """A histogram that is told what happens."""
        spec = self._of(name, MetricKind.HISTOGRAM)
        return Histogram(spec.name, spec.text, spec.labels, buckets=spec.buckets, registry=registry)

    def family(self, name: str, values: Mapping[tuple[str, ...], float] | float) -> Families:
        """A counter or gauge that is read at the scrape: one value, or one for each tuple of label values."""
        spec = self[name]
        assert spec.kind is not MetricKind.HISTOGRAM, name
        make = CounterMetricFamily if spec.kind is MetricKind.COUNTER else GaugeMetricFamily
        family = make(spec.name, spec.text, labels=list(spec.labels))
        for labels, value in values.items() if isinstance(values, Mapping) else [((), values)]:
            family.add_metric(list(labels), value)
        return family

    def _of(self, name: str, kind: MetricKind) -> MetricSpec:
        spec = self[name]
        assert spec.kind is kind, f"{name} is a {spec.kind.value}"
        return spec


def process_registry() -> CollectorRegistry:
    """A registry with what every process tells of itself: CPU, memory, files, garbage collection, Python's version."""
    disable_created_metrics()  # when a series began: they double the scrape, and no query asks for them
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry
