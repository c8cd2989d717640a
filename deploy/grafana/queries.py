"""Expressions that several boards ask for."""

from deploy.grafana.model import Query

QUANTILES = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))


def quantiles(histogram: str, *labels: str, legend: str = "", filters: str = "") -> tuple[Query, ...]:
    """p50, p90 and p99 of a histogram over the window, for each value of `labels`."""
    by = ", ".join(("run", "le", *labels))
    named = "".join(f" {{{{{label}}}}}" for label in labels)
    return tuple(
        Query(
            f"histogram_quantile({q}, sum by ({by}) (rate({histogram}_bucket{{@{filters}}}[WINDOW])))",
            f"{legend or '{{run}}'} {name}{named}",
        )
        for q, name in QUANTILES
    )


def mean(histogram: str, *labels: str, legend: str = "mean") -> Query:
    """Mean of a histogram over the window."""
    by = ", ".join(("run", *labels))
    parts = (f"sum by ({by}) (rate({histogram}_{part}{{@}}[WINDOW]))" for part in ("sum", "count"))
    return Query(" / ".join(parts), f"{{{{run}}}} {legend}")


def rate(counter: str, *labels: str, legend: str = "") -> Query:
    """Growth of a counter a second, for each value of `labels`."""
    by = ", ".join(("run", *labels))
    return Query(f"sum by ({by}) (rate({counter}{{@}}[WINDOW]))", legend or _legend(labels))


def increase(counter: str, *labels: str, legend: str = "") -> Query:
    """Growth of a counter over the window, for each value of `labels`."""
    by = ", ".join(("run", *labels))
    return Query(f"sum by ({by}) (increase({counter}{{@}}[WINDOW]))", legend or _legend(labels))


def value(gauge: str, *labels: str, legend: str = "", filters: str = "") -> Query:
    """A gauge as it is."""
    by = ", ".join(("run", *labels))
    return Query(f"max by ({by}) ({gauge}{{@{filters}}})", legend or _legend(labels))


def step_metric(name: str, legend: str) -> Query:
    """One of the trainer's step metrics, as it reported it to the service."""
    return Query(f'max by (run) (april_trainer_metric{{@, name="{name}"}})', f"{{{{run}}}} {legend}")


def step_metrics(pattern: str) -> Query:
    """All of the trainer's step metrics whose names match."""
    return Query(f'max by (run, name) (april_trainer_metric{{@, name=~"{pattern}"}})', "{{run}} {{name}}")


def share(part: str, whole: str, legend: str) -> Query:
    """Growth of one counter over that of another."""
    return Query(
        f"sum by (run) (rate({part}{{@}}[WINDOW])) / sum by (run) (rate({whole}{{@}}[WINDOW]))", f"{{{{run}}}} {legend}"
    )


def _legend(labels: tuple[str, ...]) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in ("run", *labels))
