"""What lines become: histograms of hand-made lines, whose values are known."""

import math

import pytest
from prometheus_client import CollectorRegistry

from rollout_service.metrics import lines
from rollout_service.metrics.lines import LineMetrics


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def metrics(registry):
    return LineMetrics(registry, batch_groups=2, group_samples=2)


def attempt(sample, start, end, tokens, how, *, before=0, waited=1.0, prompt=5, version=0):
    return {
        "kind": "attempt",
        "sample": sample,
        "group": sample.rpartition(".")[0],
        "prompt_tokens": prompt,
        "waited_s": waited,
        "started_at": start,
        "ended_at": end,
        "before": before,
        "segments": [[version, tokens, start, end]] if tokens else [],
        "end": how,
    }


def score(sample, at, failed=None):
    return {"kind": "score", "sample": sample, "reward": None if failed else 1.0, "failed": failed, "at": at}


def round_line(**changes):
    line = {
        "kind": "round",
        "started_at": 100.0,
        "offered_at": 110.0,
        "cut_at": 108.0,
        "ready_s": [3.0, 7.0, 7.5],
        "surplus_groups": 1,
        "spent": {"generating": 6.0, "tail": 3.0, "cut": 2.0},
        "slots": 4,
        "bubble_share": 0.25,
    }
    return line | changes


def test_a_resumed_sample_is_counted_once_with_all_of_its_past(registry, metrics):
    value = registry.get_sample_value
    metrics(attempt("g1.0", 10.0, 20.0, 7, "parked", waited=2.0))
    assert value("april_sample_tokens_count", {"finish": "stop"}) == 0
    metrics(attempt("g1.0", 50.0, 70.0, 4, "lost", before=7, waited=30.0))
    metrics(attempt("g1.0", 75.0, 80.0, 9, "stop", before=11, waited=5.0, version=3))
    assert value("april_sample_tokens_sum", {"finish": "stop"}) == 20
    assert value("april_sample_seconds_sum") == 70.0
    assert value("april_sample_queued_seconds_sum") == 2.0
    assert value("april_sample_parked_seconds_sum") == 35.0
    assert value("april_sample_segments_sum") == 3
    assert value("april_sample_resumes_sum") == 2
    assert value("april_reprefilled_tokens_total") == (5 + 7) + (5 + 11)
    assert metrics._past == {}


def test_a_sample_that_began_before_this_process_is_left_out_of_what_needs_its_past(registry, metrics):
    metrics(attempt("g1.0", 50.0, 70.0, 4, "length", before=7, waited=None))
    assert registry.get_sample_value("april_sample_tokens_sum", {"finish": "length"}) == 11
    assert registry.get_sample_value("april_sample_seconds_count") == 0
    assert registry.get_sample_value("april_sample_resumes_count") == 0


def test_a_group_lasts_from_its_admission_to_the_last_score_that_it_needs(registry, metrics):
    value = registry.get_sample_value
    metrics(attempt("g1.0", 10.0, 20.0, 7, "stop", waited=2.0))
    metrics(attempt("g1.1", 15.0, 40.0, 7, "stop", waited=7.0))
    metrics(score("g1.0", 21.0))
    assert value("april_group_seconds_count") == 0
    metrics(score("g1.1", 41.0))
    assert value("april_group_seconds_count") == 1
    assert value("april_group_seconds_sum") == 41.0 - 8.0


def test_a_group_of_which_nothing_could_be_scored_is_none(registry, metrics):
    metrics(attempt("g1.0", 10.0, 20.0, 7, "stop"))
    metrics(score("g1.0", 21.0, "reward_error"))
    metrics(score("g1.1", 22.0, "engine_error"))
    assert registry.get_sample_value("april_group_seconds_count") == 0
    assert metrics._groups == {}


def test_a_round_tells_its_parts(registry, metrics):
    value = registry.get_sample_value
    metrics(attempt("g1.0", 101.0, 107.0, 3, "parked"))  # parked before the cut: for an install
    metrics(attempt("g2.0", 101.0, 108.5, 3, "parked"))
    metrics(attempt("g2.1", 101.0, 109.0, 3, "parked"))
    metrics(round_line())
    metrics(round_line(started_at=114.0, offered_at=120.0, cut_at=None, ready_s=[1.0], bubble_share=None))
    assert value("april_round_seconds_sum") == 10.0 + 6.0
    assert value("april_round_nth_finish_seconds_count") == 1
    assert value("april_round_nth_finish_seconds_sum") == 7.0
    assert value("april_round_cut_seconds_sum") == 2.0
    assert value("april_round_stragglers_sum") == 2
    assert value("april_round_stragglers_count") == 2
    assert value("april_park_seconds_sum") == 0.5 + 1.0
    assert value("april_service_idle_seconds_sum") == 4.0
    assert value("april_slot_seconds_total") == 40.0
    assert value("april_idle_slot_seconds_total") == 10.0
    assert value("april_spent_seconds_total", {"cause": "tail"}) == 6.0
    assert value("april_spent_seconds_total", {"cause": "redis"}) == 0.0


def test_the_tail_begins_when_nine_tenths_of_the_batch_are_ready(registry):
    metrics = LineMetrics(registry, batch_groups=20, group_samples=1)
    metrics(round_line(ready_s=[float(second) for second in range(1, 21)], offered_at=121.0))
    assert registry.get_sample_value("april_round_tail_seconds_sum") == pytest.approx(21.0 - 18.0)


def test_installs_and_moments(registry, metrics):
    metrics({"kind": "install", "version": 3, "started_at": 5.0, "ended_at": 5.5})
    metrics({"kind": "moment", "at": 1.0, "values": {"parked_bytes": 80}})
    metrics({"kind": "trained", "step": 1, "at": 2.0})
    assert registry.get_sample_value("april_policy_stall_seconds_sum") == 0.5
    assert metrics.moment == {"parked_bytes": 80}


def test_what_is_remembered_is_bounded(registry, metrics, monkeypatch):
    monkeypatch.setattr(lines, "MAX_REMEMBERED", 10)
    for number in range(100):
        metrics(attempt(f"g{number}.0", 10.0, 20.0, 7, "parked"))
    assert len(metrics._past) == len(metrics._groups) == 10
    metrics(attempt("g1.0", 30.0, 40.0, 7, "stop", before=7))  # forgotten
    assert registry.get_sample_value("april_sample_seconds_count") == 0
    assert registry.get_sample_value("april_sample_tokens_count", {"finish": "stop"}) == 1


def test_buckets_hold_the_longest_and_the_slowest(registry, metrics):
    metrics(attempt("g1.0", 0.0, 7 * 3600.0, 300_000, "stop"))
    bucket = registry.get_sample_value("april_sample_seconds_bucket", {"le": "28800.0"})
    assert bucket == 1
    assert registry.get_sample_value("april_sample_tokens_bucket", {"finish": "stop", "le": "524288.0"}) == 1
    assert math.isinf(float("+Inf"))
