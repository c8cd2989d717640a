"""The reference page of all metrics, made from the catalogues of the service and of the trainer."""

from protocol.metric_spec import MetricKind, MetricSection, MetricSpec
from rollout_service.metrics.catalogue import SERVICE_CATALOGUE
from trainer.metric_catalogue import TRAINER_CATALOGUE

HEAD = """# Metrics

Printed by `python -m deploy.prometheus`; a test keeps this page, the code, the alert rules and the boards in step.

The service answers `GET /metrics` in Prometheus' text format, or in OpenMetrics if the scraper asks for it. It wants
the token, if there is one. It answers while the service starts (`april_ready` is 0) and while Redis is away (values are
the last known, `april_redis_waiting_seconds` says for how long). Counts of samples, groups and tokens are those of the
buffer: they go on where they were when the service is started again. Histograms and the counters that are fed by events
begin anew with each process, as Prometheus expects.

Rank 0 of the trainer answers on `trainer.metrics_port`, if that is set.

The number of series depends on the settings alone (replicas, scorers), never on how long the run is: no label holds a
prompt, a sample or a version. Histograms of seconds reach eight hours, those of tokens half a million.

`service.metrics = false` observes nothing as it happens: what is then left is the state at the time of the scrape.

Both also have `process_*` and `python_*` of their process: CPU seconds, resident bytes, open files, garbage collection.
"""
TABLE_HEAD = "| metric | type | unit | labels | meaning | worry when |\n|---|---|---|---|---|---|"


def metrics_page() -> str:
    """docs/metrics.md."""
    sections = (*SERVICE_CATALOGUE.sections, *TRAINER_CATALOGUE.sections)
    return HEAD + "".join(_section(section) for section in sections)


def _section(section: MetricSection) -> str:
    rows = "\n".join(_row(spec) for spec in section.metrics)
    return f"\n## {section.title}\n\n{TABLE_HEAD}\n{rows}\n"


def _row(spec: MetricSpec) -> str:
    kind = spec.kind.value
    if spec.kind is MetricKind.HISTOGRAM:
        kind = f"histogram, {spec.buckets[0]:g} to {spec.buckets[-1]:g}"
    labels = ", ".join(f"`{label}`" for label in spec.labels)
    cells = (f"`{spec.name}`", kind, spec.unit, labels, spec.text, spec.worry)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
