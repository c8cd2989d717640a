"""The trace that a running service leaves, against what its buffer and its batches say."""

import logging
from pathlib import Path

import pytest

from rollout_service.tuning.trace_open import open_trace
from rollout_service.tuning.trace_reader import read_trace
from tests.support.service import running_service, service_settings


async def run_steps(tmp_path: Path, num_steps: int, **changes):
    """A service with a trace and a trainer that takes no time; the batches."""
    settings = service_settings(tmp_path, **changes)
    recorder = open_trace(settings, 1)
    batches = []
    async with running_service(settings, trace=recorder) as service:
        headers = await service.open_trainer()
        for step in range(1, num_steps + 1):
            batches.append(await service.batch(step, headers))
            await service.publish(step, headers)
    recorder.close()
    return settings, batches


async def test_trace_tells_of_every_trained_sample_as_it_was(tmp_path: Path) -> None:
    settings, batches = await run_steps(tmp_path, 6, rollout={"n": 2, "ratio": 2.0, "lookahead": 0, "max_lag": 4})
    trace = read_trace(tmp_path)
    assert trace.run == settings.run.name
    assert trace.notes == []
    traced = {sample.sample_id: sample for sample in trace.samples}
    num_resumed = 0
    for batch in batches:
        for row, header in enumerate(batch.header.samples):
            sample = traced[header.sample_id]
            begin, end = batch.sample_offsets[row : row + 2]
            tokens = int(end - begin - batch.prompt_lengths[row])
            assert sample.finished
            assert sample.num_tokens == tokens
            assert sample.prompt_tokens == batch.prompt_lengths[row]
            assert sample.reward == pytest.approx(float(batch.rewards[row]))
            written = [s for attempt in sample.attempts for s in attempt.segments]
            assert sum(s.num_tokens for s in written) == tokens
            versions = [v for s in written for v in [s.version] * s.num_tokens]
            assert versions == batch.versions[begin + batch.prompt_lengths[row] : end].tolist()
            ends = [attempt.end for attempt in sample.attempts]
            assert set(ends[:-1]) <= {"parked"}
            assert ends[-1] == header.finish_reason
            num_resumed += len(ends) > 1
            before = 0
            for attempt in sample.attempts:
                assert attempt.before == before
                assert attempt.waited_s is not None
                assert attempt.waited_s >= 0
                assert attempt.started_at <= attempt.ended_at
                before += sum(s.num_tokens for s in attempt.segments)
    assert num_resumed, "a ratio of 2 parks some"


async def test_trace_tells_of_rounds_steps_and_installs(tmp_path: Path) -> None:
    settings, _ = await run_steps(tmp_path, 5, rollout={"n": 2, "ratio": 2.0, "lookahead": 0, "max_lag": 4})
    trace = read_trace(tmp_path)
    assert [r.round for r in trace.rounds][:5] == [1, 2, 3, 4, 5]
    for line in trace.rounds:
        assert line.cut_at is None or line.started_at <= line.cut_at <= line.offered_at
        assert list(line.ready_s) == sorted(line.ready_s)
        assert max((running for _, running in line.running), default=0) <= settings.engine.max_num_seqs
        assert [at for at, _ in line.running] == sorted(at for at, _ in line.running)
    assert sum(r.num_fresh for r in trace.rounds[:5]) >= 5 * settings.data.train_batch_size
    assert [t.step for t in trace.trained][:4] == [1, 2, 3, 4]
    assert [i.version for i in trace.installs][:4] == [1, 2, 3, 4]
    assert all(i.started_at <= i.ended_at for i in trace.installs)
    assert trace.limits is not None
    assert trace.limits.ratio == 2.0
    assert trace.limits.slots == 32


async def test_a_service_without_a_trace_writes_none(tmp_path: Path) -> None:
    await run_steps(tmp_path, 1, trace={"enabled": False})
    assert not (tmp_path / "trace").exists()


async def test_a_disk_that_fails_ends_the_trace_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "trace").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        _, batches = await run_steps(tmp_path, 3)
    assert len(batches) == 3
    warnings = [r for r in caplog.records if "the trace stops, the run goes on" in r.getMessage()]
    assert len(warnings) == 1


async def test_failed_samples_are_marked(tmp_path: Path) -> None:
    settings = replace_min(service_settings(tmp_path))
    recorder = open_trace(settings, 1)
    async with running_service(settings, trace=recorder) as service:
        service.scorer.fails = lambda task: task.sample_id.endswith("1")
        headers = await service.open_trainer()
        await service.batch(1, headers)
    recorder.close()
    failed = {s.sample_id: s.failed for s in read_trace(tmp_path).samples if s.failed}
    assert failed
    assert all(sample_id.endswith("1") and reason == "reward_error" for sample_id, reason in failed.items())


def replace_min(settings):
    """Groups go on with one sample."""
    return settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"min_group_samples": 1})})
