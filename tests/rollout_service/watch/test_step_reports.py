"""What a trainer reports of its steps: whose word counts, what a step keeps, and what is counted once."""

from pathlib import Path

import pytest

from protocol.messages import TRAINER_EPOCH_HEADER
from rollout_service.watch.steps import StepHistory
from tests.support.service import TestService, running_service, service_settings

METRICS = "/v1/trainers/metrics"


def test_an_evaluation_that_ends_late_joins_its_step_and_takes_no_other() -> None:
    history = StepHistory()
    history.put(0, {"eval/reward": 0.1})  # before training
    for step in range(1, 9):
        history.put(step, {"reward/mean": step / 10})
    history.put(6, {"eval/reward": 0.6, "eval/source/a/mean@1": 0.5})  # its last one in the background
    history.put(8, {"eval/reward": 0.8})  # after training
    picture = history.picture()
    assert picture.steps == list(range(9))
    assert picture.series["reward/mean"] == [None, *(step / 10 for step in range(1, 9))]
    assert picture.series["eval/reward"] == [0.1, *[None] * 5, 0.6, None, 0.8]


def test_a_late_evaluation_of_a_step_that_was_thinned_out_has_one_of_its_own() -> None:
    history = StepHistory()
    for step in (2, 4, 6):
        history.put(step, {"reward/mean": 0.5})
    before = history.snapshot()
    history.put(4, {"eval/reward": 0.4})
    history.put(3, {"eval/reward": 0.3})
    assert history.picture().steps == [2, 3, 4, 6]
    assert history.picture().series["eval/reward"] == [None, 0.3, 0.4, None]
    assert "eval/reward" not in before.picture().series, "a snapshot never changes"


def test_a_trainer_that_went_back_gives_later_steps_up() -> None:
    history = StepHistory()
    for step in range(1, 9):
        history.put(step, {"reward/mean": step / 10})
    changes = history.num_changes
    history.go_back_to(8)
    assert (history.last_step, history.num_changes) == (8, changes), "nothing was given up"
    history.go_back_to(6)
    assert (history.last_step, history.num_changes) == (6, changes + 1)
    history.put(5, {"reward/mean": 0.55, "eval/reward": 0.9})
    assert history.picture().series["reward/mean"] == [0.1, 0.2, 0.3, 0.4, 0.55]


async def _calls(service: TestService, headers: dict[str, str]) -> dict[str, int]:
    """Every call that changes something, with these headers: what was answered."""
    bodies = {
        "/v1/batches": {"step": 1, "wait_s": 0},
        "/v1/trainers/steps/1": None,
        "/v1/batches/1/ack": None,
        "/v1/policies": {"step": 1, "path": service.write_weights(1)},
        METRICS: {"step": 1, "metrics": {"reward/mean": 0.0}},
    }
    answers = {path: await service.client.post(path, json=body, headers=headers) for path, body in bodies.items()}
    return {path: answer.status_code for path, answer in answers.items()}


async def test_a_trainer_without_the_newest_session_changes_nothing(tmp_path: Path) -> None:
    async with running_service(service_settings(tmp_path)) as service:
        old = await service.open_trainer()
        await service.batch(1, old)
        new = await service.open_trainer()
        for step in (1, 2, 3):
            body = {"step": step, "metrics": {"reward/mean": step / 10}}
            assert (await service.client.post(METRICS, json=body, headers=new)).status_code == 204
        never = {TRAINER_EPOCH_HEADER: str(int(new[TRAINER_EPOCH_HEADER]) + 1)}
        for wrong in (old, never):
            assert set((await _calls(service, wrong)).values()) == {409}
        refused = await service.client.post(METRICS, json={"step": 1, "metrics": {}}, headers=never)
        picture = (await service.client.get("/v1/pictures/steps")).json()
        status = (await service.client.get("/v1/status")).json()
    assert refused.json()["type"].endswith("fenced")
    assert "epoch" in refused.json()["detail"]
    assert picture["series"]["reward/mean"] == [0.1, 0.2, 0.3]
    assert status["trainer_metrics"]["step"] == 3


async def test_a_new_session_gives_up_what_no_checkpoint_holds(tmp_path: Path) -> None:
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        for step in (1, 2, 3):
            await service.batch(step, headers)
            await service.client.post(METRICS, json={"step": step, "metrics": {"reward/mean": 0.1}}, headers=headers)
            await service.publish(step, headers)
        await service.client.post("/v1/batches/2/ack", headers=headers)
        await service.open_trainer(durable_step=2)
        picture = (await service.client.get("/v1/pictures/steps")).json()
    assert picture["steps"] == [1, 2]


async def test_the_wait_of_a_step_counts_once_in_a_session(tmp_path: Path) -> None:
    async def idle_s(service: TestService) -> float:
        text = (await service.client.get("/metrics")).text
        return next(
            float(line.split()[1]) for line in text.splitlines() if line.startswith("april_trainer_idle_seconds_total ")
        )

    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        for step in (1, 2, 2, 1, 2):
            body = {"step": step, "metrics": {"timing_s/wait": 2.0, "step": 99.0}}
            assert (await service.client.post(METRICS, json=body, headers=headers)).status_code == 204
        assert await idle_s(service) == pytest.approx(4.0)
        headers = await service.open_trainer()
        for step in (1, 1):  # trained again from an older checkpoint: it waits again
            body = {"step": step, "metrics": {"timing_s/wait": 3.0}}
            await service.client.post(METRICS, json=body, headers=headers)
        assert await idle_s(service) == pytest.approx(7.0)
