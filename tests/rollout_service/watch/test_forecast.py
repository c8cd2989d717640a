"""What other ratios would do: the job, its process, and when it is done."""

import asyncio
import math
import random
from pathlib import Path

import pytest

from protocol.errors import DataError
from rollout_service.watch import predictor as predictor_module
from rollout_service.watch.as_trace import trace_of
from rollout_service.watch.forecast_job import do_job, make_job
from rollout_service.watch.observed import Choices
from rollout_service.watch.predictor import Predictor
from tests.rollout_service.watch.lines import attempt, watch_of
from tests.support.service import service_settings

CHOICES = Choices(ratio=1.3, lookahead=0, max_lag=2, train_batch_size=4, max_num_seqs=8, num_reward_workers=1)


def job_of(tmp_path: Path, sigma: float, batch: int = 4, slots: int = 8) -> dict:
    """Of a run with lognormal lengths, on the simulated engine."""
    rng = random.Random(1)
    lines = [
        attempt(f"g{i // 2}.{i % 2:03d}", max(1, round(math.exp(rng.gauss(4, sigma)))), prompt=f"p{i // 2}")
        for i in range(600)
    ]
    engine = {"max_num_seqs": slots, "simulated": {"step_base_s": 0.01, "step_per_sequence_s": 0.0}}
    settings = service_settings(tmp_path, engine=engine, data={"train_batch_size": batch})
    view = watch_of(*lines, train_batch_size=batch, slots=slots).view(0.0)
    return make_job(trace_of(view, "run"), CHOICES, settings, tmp_path)


def test_a_long_tail_wants_a_ratio_and_none_does_not(tmp_path: Path) -> None:
    tailed, even = do_job(job_of(tmp_path, 1.2)), do_job(job_of(tmp_path, 0.0))
    ratios = [row["ratio"] for row in tailed["predicted"]]
    assert ratios == [1.0, 1.25, 1.3, 1.5, 2.0, 2.5, 3.0]  # the run's own among them, and none that max_lag forbids
    assert tailed["recommended"] > 1
    assert max(row["speed_up"] for row in tailed["predicted"]) > 1.1
    assert even["recommended"] == 1.0
    assert "1.0 is best here" in even["reason"]
    shares = [row["off_policy_share"] for row in tailed["predicted"]]
    assert shares[0] == 0.0
    assert shares[-1] > shares[1]


def test_a_large_run_is_simulated_small_and_scaled_back(tmp_path: Path) -> None:
    small, large = do_job(job_of(tmp_path, 1.0)), do_job(job_of(tmp_path, 1.0, batch=4 * 256, slots=8 * 256))
    for mine, its in zip(small["predicted"], large["predicted"], strict=True):
        # With 256 times the slots; a larger batch waits for rarer, longer responses.
        assert 50 * mine["tokens_per_s"] < its["tokens_per_s"] < 256 * mine["tokens_per_s"]


def test_too_little_is_known_is_a_sentence(tmp_path: Path) -> None:
    view = watch_of(attempt("g1.000", 5)).view(0.0)
    with pytest.raises(DataError, match="1 responses have finished, a prediction needs 100"):
        make_job(trace_of(view, "run"), CHOICES, None, tmp_path)


async def test_one_job_at_a_time_in_a_process_of_its_own(tmp_path: Path) -> None:
    job, made = job_of(tmp_path, 1.0), []
    predictor = Predictor()
    for _ in range(3):
        predictor.wanted(CHOICES, lambda: made.append(1) or job)
    assert "not run yet" in predictor.note()
    await predictor.settled()
    assert made == [1]
    assert predictor.note() is None
    assert predictor.recommended is not None
    assert len(predictor.predicted) == 7
    predictor.wanted(CHOICES, lambda: made.append(1) or job)  # it is fresh
    assert predictor._task is None
    await predictor.close()


async def test_other_settings_want_another_prediction_and_closing_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, 1.0)
    predictor = Predictor()
    predictor.wanted(CHOICES, lambda: job)
    await asyncio.sleep(0.3)
    await predictor.close()
    assert predictor.predicted == []
    other = Choices(ratio=2.0, lookahead=0, max_lag=2, train_batch_size=4, max_num_seqs=8, num_reward_workers=1)
    predictor.wanted(other, _fails)
    await predictor.settled()
    assert predictor.note() == "nothing is known yet"
    monkeypatch.setattr(predictor_module, "TIMEOUT_S", 0.01)
    predictor.wanted(CHOICES, lambda: job)
    await predictor.settled()
    assert "did not finish" in predictor.note()


def _fails() -> dict:
    raise DataError("nothing is known yet")
