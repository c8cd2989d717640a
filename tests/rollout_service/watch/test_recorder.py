"""What the recorder counts while a service runs, whatever becomes of samples."""

import random
from pathlib import Path

import pytest

from rollout_service.tuning.trace_recorder import TraceRecorder
from tests.support.service import running_service, service_settings

ROLLOUT = {"n": 2, "ratio": 2.0, "lookahead": 0, "max_lag": 4, "min_group_samples": 1}


@pytest.mark.parametrize("samples_ratio", [1.0, 2.0])
async def test_nothing_waits_for_a_score_for_ever(tmp_path: Path, samples_ratio: float) -> None:
    """Scores that fail, groups that are READY without a sample or dropped: each ends the wait."""
    settings = service_settings(tmp_path, rollout=ROLLOUT | {"samples_ratio": samples_ratio})
    rng, lines = random.Random(5), []
    recorder = TraceRecorder([lines.append])
    async with running_service(settings, trace=recorder) as service:
        service.scorer.fails = lambda task: rng.random() < 0.3
        headers = await service.open_trainer()
        for step in range(1, 9):
            await service.batch(step, headers)
            assert recorder.num_scoring >= 0
            await service.publish(step, headers)
        await service.client.post("/v1/pause")
        await service.until(lambda: service.parts.loop.safe_to_stop)
        assert recorder.num_scoring == 0
        assert recorder.running() == []
    finished = {line["sample"] for line in lines if line["kind"] == "attempt" and line["end"] in ("stop", "length")}
    scored = [line["sample"] for line in lines if line["kind"] == "score"]
    assert len(scored) == len(set(scored))
    assert set(scored) <= finished
    if samples_ratio == 1.0:
        assert set(scored) == finished


async def test_every_sink_is_told_the_same_and_none_after_the_end(tmp_path: Path) -> None:
    first, second = [], []
    recorder = TraceRecorder([first.append])
    recorder.add_sink(second.append)
    async with running_service(service_settings(tmp_path), trace=recorder) as service:
        headers = await service.open_trainer()
        await service.batch(1, headers)
    recorder.close()
    assert first == second
    assert {line["kind"] for line in first} >= {"attempt", "score", "round"}
    recorder.scored("g1.000", 1.0)
    assert first == second


def test_without_a_sink_nothing_is_kept() -> None:
    recorder = TraceRecorder()
    recorder.scored("g1.000", 1.0)
    recorder.admitted(["g1"])
    assert recorder.round_so_far() is None
    assert recorder.running() == []
    assert recorder.num_scoring == 0
