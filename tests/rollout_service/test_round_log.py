"""The log line of a round: one for each offered batch, with the numbers that the buffer and the trace have."""

import json
import logging
from pathlib import Path

import pytest

from rollout_service.tuning.trace_open import open_trace
from tests.support.service import running_service, service_settings

NUM_STEPS = 6
FIELDS = {
    "event", "round", "duration_s", "waited_s", "ready", "cut", "parked", "surplus", "fresh", "dropped", "tokens",
    "tokens_per_s", "bubble_share", "ratio", "ratio_wish", "samples_ratio", "version", "step", "ledger_error",
}  # fmt: skip


async def test_each_batch_has_one_line_whose_numbers_add_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = service_settings(tmp_path, rollout={"n": 2, "ratio": 2.0, "lookahead": 0, "max_lag": 4})
    recorder = open_trace(settings, 1)
    with caplog.at_level(logging.INFO, "rollout_service.round_log"):
        async with running_service(settings, trace=recorder) as service:
            headers = await service.open_trainer()
            for step in range(1, NUM_STEPS + 1):
                await service.batch(step, headers)
                await service.publish(step, headers)
            await service.until(lambda: len(_lines(caplog)) > NUM_STEPS)
            snapshot = service.parts.loop.snapshot
            recorder.close()
    assert snapshot is not None
    lines = _lines(caplog)[:NUM_STEPS]
    assert [line["round"] for line in lines] == list(range(1, NUM_STEPS + 1))
    traced = _rounds(tmp_path)
    for line in lines:
        assert set(line) >= FIELDS
        trace = traced[line["round"]]
        assert line["event"] == "round"
        assert line["ready"] == len(trace["ready_s"])
        assert line["fresh"] == trace["num_fresh"]
        assert line["dropped"] == trace["num_dropped"] == 0
        assert line["surplus"] == trace["surplus_groups"]
        assert line["parked"] == trace["parked_samples"]
        assert line["version"] == trace["active_version"]
        assert line["bubble_share"] == pytest.approx(trace["bubble_share"], abs=0.02)
        assert line["duration_s"] == pytest.approx(trace["offered_at"] - trace["started_at"], abs=0.05)
        assert line["ratio"] == 2.0
        assert line["ledger_error"] == 0
        assert f"round {line['round']}: {line['ready']} group" in line["message"]
    assert sum(line["cut"] for line in lines), "a ratio of 2 cuts some"
    assert lines[0]["waited_s"] is None
    assert all(line["waited_s"] >= 0 for line in lines[1:])
    # All that was generated and kept is in exactly one line; the rounds that are traced hold the same tokens.
    tokens = sum(s[1] for line in _attempts(tmp_path) if line["round"] <= NUM_STEPS for s in line["segments"])
    assert sum(line["tokens"] for line in lines) == tokens


def _lines(caplog: pytest.LogCaptureFixture) -> list[dict]:
    return [
        record.__dict__ | {"message": record.getMessage()}
        for record in caplog.records
        if getattr(record, "event", None) == "round"
    ]


def _trace(folder: Path) -> list[dict]:
    files = sorted((folder / "trace").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def _rounds(folder: Path) -> dict[int, dict]:
    return {line["round"]: line for line in _trace(folder) if line["kind"] == "round"}


def _attempts(folder: Path) -> list[dict]:
    return [line for line in _trace(folder) if line["kind"] == "attempt"]
