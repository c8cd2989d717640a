"""A service that takes up what another left: with other settings, in another folder, on a disk that is full."""

import pytest

from buffer.memory import MemoryBuffer
from tests.support.service import running_service, service_settings


@pytest.mark.parametrize("groups", [1, 3, 16])
async def test_what_was_offered_with_another_batch_size_is_delivered_with_that_of_now(tmp_path, groups):
    buffer = MemoryBuffer()
    async with running_service(service_settings(tmp_path), buffer) as service:
        await service.until(
            lambda: service.parts.loop.snapshot is not None and service.parts.loop.snapshot.offered == 2
        )
    later = service_settings(tmp_path, data={"train_batch_size": groups})
    async with running_service(later, buffer) as service:
        headers = await service.open_trainer()
        for step in (1, 2, 3):
            batch = await service.batch(step, headers)
            assert len({sample.sample_id.partition(".")[0] for sample in batch.header.samples}) == groups
            await service.publish(step, headers)
        snapshot = await buffer.snapshot()
        assert snapshot.ledger.error == 0


async def test_a_copied_run_leaves_the_weights_of_the_run_it_came_from(tmp_path):
    buffer = MemoryBuffer()
    async with running_service(service_settings(tmp_path / "origin"), buffer) as service:
        headers = await service.open_trainer()
        await service.batch(1, headers)
        await service.publish(1, headers)
        await service.until(lambda: service.parts.loop.snapshot.active_version == 1)
        origin = service.parts.settings.weights_root / "step-1"
    async with running_service(service_settings(tmp_path / "copy"), buffer) as service:
        headers = await service.open_trainer(1)
        for step in range(2, 7):
            await service.batch(step, headers)
            await service.publish(step, headers)
            await service.until(lambda version=step: service.parts.loop.snapshot.active_version == version)
        assert origin.is_dir(), "the version is long superseded, but its folder belongs to another run"
        assert not (service.parts.settings.weights_root / "step-2").exists(), "its own are cleaned up"


async def test_other_weights_for_a_step_that_is_published_are_refused(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        await service.batch(1, headers)
        version = await service.publish(1, headers)
        (service.parts.settings.weights_root / service.write_weights(2)).rename(tmp_path / "weights" / "other")
        answer = await service.client.post("/v1/policies", json={"step": 1, "path": "other"}, headers=headers)
        assert answer.status_code == 409
        assert f"as version {version}" in answer.json()["detail"]
        (service.parts.settings.weights_root / "other").rename(tmp_path / "weights" / "gone")
        assert await service.publish(1, headers) == version, "the same folder again is the same version"


async def test_an_ack_of_an_older_step_says_which_step_is_durable(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        for step in (1, 2):
            await service.batch(step, headers)
            await service.publish(step, headers)
        assert (await service.client.post("/v1/batches/2/ack", headers=headers)).json()["durable_step"] == 2
        assert (await service.client.post("/v1/batches/1/ack", headers=headers)).json()["durable_step"] == 2


async def test_a_spool_that_can_not_be_written_is_what_the_service_waits_for_until_it_can(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        spool = service.parts.settings.spool_dir
        spool.parent.mkdir(parents=True, exist_ok=True)
        spool.write_text("a file is in the way")
        asked = {"step": 1, "wait_s": 30}
        answer = await service.client.post("/v1/batches", json=asked, headers=headers)
        assert answer.status_code == 503
        ready = await service.client.get("/readyz")
        assert ready.status_code == 503
        assert "the batch of step 1 can't be written" in ready.json()["waits"][0]
        spool.unlink()
        await service.batch(1, headers)
        assert (await service.client.get("/readyz")).status_code == 200
