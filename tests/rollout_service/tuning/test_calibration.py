"""Fitting the engine model: planted numbers come back, from stretches, from a trace, and from an engine."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import DataError
from rollout_service.tuning.calibrate import _Stream as Stream  # pyright: ignore[reportPrivateUsage]
from rollout_service.tuning.calibrate import calibrate_engine, grid, stretches_of
from rollout_service.tuning.calibration import Stretch, fit, nonnegative_least_squares, stretches_of_trace
from rollout_service.tuning.engine_model import EngineModel, engine_of_json, read_engine
from tests.rollout_service.tuning.records import attempt
from tests.support.service import service_settings

PLANTED = EngineModel(64, 0.004, 0.0002, 1e-7, 2e-5, 10_000)


def planted(rng: np.random.Generator, count: int, noise: float = 0.0) -> list[Stretch]:
    """Stretches of the planted engine."""
    stretches = []
    for _ in range(count):
        steps, running = float(rng.integers(4, 80)), float(rng.integers(1, 65))
        context, prefilled = running * float(rng.integers(10, 800)), float(rng.integers(0, 2000))
        seconds = (
            steps * (PLANTED.step_base_s + PLANTED.step_per_sequence_s * running)
            + steps * PLANTED.step_per_context_token_s * context
            + prefilled * PLANTED.prefill_per_token_s
        )
        seconds *= 1 + noise * float(rng.standard_normal())
        stretches.append(Stretch(seconds, steps, steps * running, steps * context, prefilled))
    return stretches


def close(found: EngineModel, rel: float) -> None:
    assert found.step_base_s == pytest.approx(PLANTED.step_base_s, rel=rel)
    assert found.step_per_sequence_s == pytest.approx(PLANTED.step_per_sequence_s, rel=rel)
    assert found.step_per_context_token_s == pytest.approx(PLANTED.step_per_context_token_s, rel=rel)
    assert found.prefill_per_token_s == pytest.approx(PLANTED.prefill_per_token_s, rel=rel)


def test_planted_numbers_come_back_exactly() -> None:
    found = fit(planted(np.random.default_rng(0), 40), 64, 10_000)
    close(found.engine, 1e-6)
    assert found.r_squared == pytest.approx(1.0)
    assert found.worst_error < 1e-6
    assert found.engine.kv_tokens == 10_000


def test_disturbed_stretches_count_for_little() -> None:
    rng = np.random.default_rng(1)
    stretches = planted(rng, 200, noise=0.02)
    for index in range(0, 200, 20):  # a twentieth took three times as long: another process had the core
        s = stretches[index]
        stretches[index] = Stretch(3 * s.seconds, s.steps, s.running, s.context, s.prefilled)
    found = fit(stretches, 64, 0)
    close(found.engine, 0.12)
    assert found.median_error < 0.03
    assert found.worst_error > 0.5, "and the report says that some don't fit"


@given(st.integers(0, 10_000))
def test_least_squares_without_negative_numbers_are_the_best_there_are(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, wanted = rng.standard_normal((8, 3)), rng.standard_normal(8)
    found = nonnegative_least_squares(rows, wanted)
    assert (found >= 0).all()
    gradient = rows.T @ (rows @ found - wanted)
    assert (gradient[found == 0] >= -1e-8).all(), "raising a zero makes it worse (Karush-Kuhn-Tucker)"
    assert np.abs(gradient[found > 0]).max(initial=0) < 1e-8


def test_too_little_to_fit() -> None:
    with pytest.raises(DataError, match="too few"):
        fit(planted(np.random.default_rng(0), 3), 64, 0)


def test_a_calibration_is_read_back(tmp_path) -> None:
    import json

    found = fit(planted(np.random.default_rng(0), 40), 64, 10_000)
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(found.to_json()))
    assert read_engine(file) == found.engine
    for broken in ("{", "[]", "{}", json.dumps(found.to_json() | {"version": 99})):
        file.write_text(broken)
        with pytest.raises(DataError, match="april calibrate"):
            read_engine(file)
    wrong = found.to_json()
    wrong["engine"]["slots"] = -1
    with pytest.raises(DataError, match="slots"):
        engine_of_json(wrong, "here")


def test_stretches_of_a_run_count_steps_sequences_and_context() -> None:
    long = Stream(10, [(1.0 + 0.5 * i, 1) for i in range(9)])
    short = Stream(20, [(1.0, 1), (1.5, 1)])
    prefill, *windows = stretches_of(0.0, [long, short])
    assert (prefill.seconds, prefill.steps, prefill.running, prefill.prefilled) == (1.0, 1.0, 2.0, 30.0)
    assert sum(w.steps for w in windows) == 8
    assert sum(w.running for w in windows) == 9, "the short one was in one step after the first"
    assert sum(w.context for w in windows) == sum(range(11, 19)) + 21
    assert sum(w.seconds for w in windows) == pytest.approx(4.0)


def test_a_trace_gives_the_engine_back() -> None:
    """Attempts of a simulated engine, whose times follow from the planted numbers step by step."""
    rng = np.random.default_rng(2)
    engine = EngineModel(16, 0.004, 0.0003, 0.0, 0.0)
    now, running, attempts = 0.0, {}, []
    for number in range(400):
        running[number] = [now, int(rng.integers(5, 60)), 0]
        wait = int(rng.integers(1, 6)) if len(running) < 16 else 60
        while running and wait > 0:
            now += engine.step_s(len(running), 0)
            wait -= 1
            for key in list(running):
                running[key][2] += 1
                if running[key][2] == running[key][1]:
                    start, tokens, _ = running.pop(key)
                    attempts.append(attempt(f"g{key}.000", tokens, started_at=start, ended_at=now))
                    wait = min(wait, 1 if len(running) < 16 else wait)
    found = fit(stretches_of_trace(attempts), 16, 0).engine
    assert found.step_base_s == pytest.approx(engine.step_base_s, rel=0.1)
    assert found.step_per_sequence_s == pytest.approx(engine.step_per_sequence_s, rel=0.1)


def test_grid_stays_within_the_kv_cache() -> None:
    points = grid(64, 1000, 5000, 64)
    assert (1, 936) in points
    assert all(r * (c + 64) <= 5000 or r == 1 for r, c in points)
    assert max(r for r, _ in grid(64, 1000, 0, 64)) == 64


async def test_the_simulated_engine_is_measured_as_it_is(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout_service.tuning import calibrate

    monkeypatch.setattr(calibrate, "MEASURE_S", 12.0)
    settings = service_settings(
        tmp_path,
        data={"train_batch_size": 4, "max_prompt_length": 64, "max_response_length": 64},
        engine={
            "backend": "simulated",
            "max_num_seqs": 32,
            "num_replicas": 2,
            "simulated": {"median_tokens": 200, "sigma": 0.3, "step_base_s": 0.008, "step_per_sequence_s": 0.001},
        },
    )
    said: list[str] = []
    found = await calibrate_engine(settings, said.append)
    assert found.engine.slots == 64, "two replicas"
    assert found.engine.step_per_sequence_s * 2 == pytest.approx(0.001, rel=0.25)
    assert found.engine.step_base_s == pytest.approx(0.008, rel=0.6)  # this machine's timers come on top
    assert 0 < found.r_squared <= 1  # how near to 1 says how quiet this machine is
    assert said[0] == "starting the engine"
