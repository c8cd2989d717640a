"""The catalogue itself: names, units, buckets, and that code and catalogue hold the same."""

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from protocol.collectors import Catalogue
from protocol.metric_spec import MetricKind, MetricSection, counter, gauge, histogram
from rollout_service.metrics.catalogue import SERVICE_CATALOGUE
from rollout_service.metrics.status import COUNTERS

ROOT = Path(__file__).parents[3]
HOURS_S = 3600.0
INCREMENT = re.compile(r"'HINCRBY', COUNTERS, '([a-z_]+)'")


@pytest.mark.parametrize("spec", list(SERVICE_CATALOGUE), ids=lambda spec: spec.name)
def test_names_tell_the_unit_and_texts_are_sentences(spec):
    assert spec.text.endswith("."), spec.text
    assert "\n" not in spec.text
    assert not {"prompt", "sample", "group", "version"} & set(spec.labels) or spec.name == "april_run_info"
    if "seconds" in spec.name:
        assert spec.unit == "seconds"
    if spec.unit == "bytes":
        assert "bytes" in spec.name


@pytest.mark.parametrize(
    "spec", [s for s in SERVICE_CATALOGUE if s.kind is MetricKind.HISTOGRAM], ids=lambda spec: spec.name
)
def test_buckets_ascend_and_reach_far_enough(spec):
    assert list(spec.buckets) == sorted(set(spec.buckets))
    if spec.unit == "seconds":
        assert spec.buckets[-1] >= 8 * HOURS_S
    if spec.unit == "tokens":
        assert spec.buckets[-1] >= 1e5


def test_every_counter_of_the_buffer_has_a_metric():
    scripts = (ROOT / "buffer" / "lua").rglob("*.lua")
    counted = {name for script in scripts for name in INCREMENT.findall(script.read_text())}
    raced = {name for name in counted if name.endswith("_")}  # the outcome is put behind it
    counted = counted - raced | {f"{name}{outcome}" for name in raced for outcome in ("trained", "left")}
    assert counted == set(COUNTERS)
    assert all(f"april_{name}_total" in SERVICE_CATALOGUE for name in COUNTERS)


def test_a_name_is_there_once_and_a_kind_is_kept_to():
    twice = MetricSection("s", (gauge("april_a", "A."), gauge("april_a", "B.")))
    with pytest.raises(AssertionError, match="twice"):
        Catalogue([twice])
    catalogue = Catalogue([MetricSection("s", (gauge("april_a", "A."),))])
    with pytest.raises(AssertionError, match="gauge"):
        catalogue.counter("april_a", CollectorRegistry())


@pytest.mark.parametrize(
    "make",
    [
        lambda: counter("april_things", "No _total."),
        lambda: gauge("april_things_total", "Not a counter."),
        lambda: gauge("things", "Not ours."),
        lambda: histogram("april_seconds", "No buckets.", "seconds", ()),
    ],
)
def test_names_follow_their_kind(make):
    with pytest.raises(AssertionError):
        make()
