"""Metrics by data source: each source's own, few enough to read, with names that trackers take."""

from dataclasses import replace

import numpy as np
import pytest

from protocol.batch import Batch
from protocol.messages import TrainerMetrics
from protocol.states import FinishReason
from tests.trainer.factory import make_batch
from trainer.metrics import batch_metrics
from trainer.sources import MAX_SOURCES, SourceReport, metric_name, source_metrics


def with_sources(batch: Batch, names: list[str]) -> Batch:
    """The same batch, its groups said to be of these data sources."""
    groups = [g.model_copy(update={"data_source": n}) for g, n in zip(batch.header.groups, names, strict=True)]
    return replace(batch, header=batch.header.model_copy(update={"groups": groups}))


def test_one_source_is_the_whole_batch() -> None:
    batch = make_batch(step=4, num_groups=5, version=3)
    whole, found = batch_metrics(batch, 3), source_metrics(batch, 3)
    for mine, theirs in (
        ("reward_mean", "reward/mean"),
        ("length_mean", "response/length_mean"),
        ("length_max", "response/length_max"),
        ("groups_without_spread", "reward/groups_without_spread"),
        ("lag_mean", "lag/mean"),
        ("num_samples", "samples/trained"),
    ):
        assert found[f"source/test/{mine}"] == pytest.approx(whole[theirs])
    assert found["source/test/truncated_share"] == pytest.approx(1 - whole["response/stopped_share"])
    assert found["source/test/num_groups"] == 5


def test_each_source_has_its_own_numbers() -> None:
    batch = with_sources(make_batch(num_groups=3, n=4), ["rare", "common", "common"])
    rewards = np.asarray([1, 1, 1, 1, 0, 1, 0, 1, 0, 0, 0, 0], np.float32)
    headers = [
        header.model_copy(update={"finish_reason": FinishReason.LENGTH if i < 3 else FinishReason.STOP})
        for i, header in enumerate(batch.header.samples)
    ]
    batch = replace(batch, rewards=rewards, header=batch.header.model_copy(update={"samples": headers}))
    found = source_metrics(batch, 0)
    lengths = np.diff(batch.sample_offsets) - batch.prompt_lengths
    assert found["source/rare/reward_mean"] == 1
    assert found["source/common/reward_mean"] == 0.25
    assert (found["source/rare/groups_without_spread"], found["source/common/groups_without_spread"]) == (1, 0.5)
    assert (found["source/rare/truncated_share"], found["source/common/truncated_share"]) == (0.75, 0)
    assert found["source/rare/length_mean"] == pytest.approx(lengths[:4].mean())
    assert found["source/common/length_max"] == lengths[4:].max()
    assert (found["source/rare/num_groups"], found["source/common/num_groups"]) == (1, 2)


def test_sources_beyond_the_cap_are_counted_together_and_names_stay() -> None:
    report = SourceReport(max_sources=3)
    first = report.metrics(with_sources(make_batch(num_groups=4), ["d", "c", "b", "a"]), 0)
    second = report.metrics(with_sources(make_batch(num_groups=4), ["a", "b", "c", "e"]), 0)
    assert {name.split("/")[1] for name in first} == {"d", "c", "other"}
    assert first["source/other/num_groups"] == 2
    assert {name.split("/")[1] for name in second} == {"c", "other"}
    assert second["source/other/num_groups"] == 3


def test_a_batch_of_many_sources_is_bounded() -> None:
    batch = make_batch(num_groups=MAX_SOURCES + 5, n=2, max_length=4)
    found = source_metrics(with_sources(batch, [f"s{i}" for i in range(MAX_SOURCES + 5)]), 0)
    assert len({name.split("/")[1] for name in found}) == MAX_SOURCES
    assert found["source/other/num_groups"] == 6


def test_names_are_those_that_the_service_takes() -> None:
    names = ["openai/gsm8k", "größe & maß", "x" * 300, "", "a\nb", "{1}"]
    found = source_metrics(with_sources(make_batch(num_groups=len(names)), names), 0)
    TrainerMetrics(step=1, metrics=found)
    assert found["source/openai/gsm8k/num_groups"] == 1
    assert metric_name("größe & maß") == "gr__e___ma_"


def test_failed_samples_are_counted_with_their_source() -> None:
    batch = make_batch(num_groups=2)
    failed = [{"sample_id": "x", "reason": "reward_timeout", "error": None}]
    groups = [batch.header.groups[0].model_validate(batch.header.groups[0].model_dump() | {"failed": failed})]
    header = batch.header.model_copy(update={"groups": [*groups, batch.header.groups[1]]})
    found = source_metrics(with_sources(replace(batch, header=header), ["a", "b"]), 0)
    assert (found["source/a/num_failed"], found["source/b/num_failed"]) == (1, 0)
