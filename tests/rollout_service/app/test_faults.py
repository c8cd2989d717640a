"""Faults around a running service: what is dropped, dies, is taken over, or asks for what can't be."""

import asyncio
import shutil

import pytest

from buffer.memory import MemoryBuffer
from buffer.memory_store import MemoryStore
from buffer.open import limits_of
from protocol.errors import FencedError
from rollout_service.events import Changed
from tests.support.provenance import check_provenance, train_steps
from tests.support.service import running_service, service_settings

pytestmark = pytest.mark.timeout(120)


async def test_a_group_dropped_under_its_running_samples_ends_quietly(tmp_path):
    settings = service_settings(tmp_path, rollout={"n": 4, "min_group_samples": 4})
    async with running_service(settings, lengths=lambda i: 3 if i.endswith(".000") else 60) as service:
        service.scorer.fails = lambda task: int(task.prompt.split()[1]) % 2 == 0 and task.sample_id.endswith(".000")
        headers = await service.open_trainer()
        batches = await train_steps(service, headers, 3)
        status = (await service.client.get("/v1/status")).json()
    assert status["ledger"]["dropped"] > 0
    assert status["ledger_error"] == 0
    for batch in batches:
        check_provenance(batch)


async def test_a_service_that_was_taken_over_stops(tmp_path):
    store = MemoryStore()
    settings = service_settings(tmp_path)
    async with running_service(settings, MemoryBuffer(store)) as service:
        await MemoryBuffer(store).claim_service("other")
        service.parts.sample_parts.mailbox.post(Changed())
        with pytest.raises(FencedError, match=r"taken over|does not own"):
            await service.loop_task


async def test_a_replica_that_dies_idle_is_restarted(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        watching = asyncio.create_task(service.parts.loop.watch())
        await service.client.post("/v1/pause")
        await service.until(lambda: not service.parts.loop.num_running)
        service.engines[0].die()
        await service.until(lambda: service.engines[0].stats().num_restarts == 1)
        await service.client.post("/v1/resume")
        check_provenance(await service.batch(1, await service.open_trainer()))
        watching.cancel()


async def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        await train_steps(service, headers, 1)
        response = await service.client.post("/v1/trainers", json={"durable_step": 9})
        huge = await service.client.post("/v1/trainers", json={"durable_step": 2**70})
    assert response.status_code == 409
    detail = response.json()["detail"]
    assert "has leased only " in detail
    assert "is new, was set back, or is another run's" in detail
    assert huge.status_code == 422


async def test_a_checkpoint_beside_a_new_buffer_goes_on_only_where_that_is_accepted(tmp_path, caplog):
    async with running_service(service_settings(tmp_path)) as service:
        body = {"durable_step": 3}
        refused = await service.client.post("/v1/trainers", json=body)
        assert refused.status_code == 409
        assert "holds step 3 and this run's buffer has leased none" in refused.json()["detail"]
        assert "accept the loss with --trainer.accept_lost_buffer=true" in refused.json()["detail"]
        untouched = (await service.client.get("/v1/status")).json()
        assert (untouched["trainer_epoch"], untouched["durable_step"]) == (0, 0)
        opened = await service.client.post("/v1/trainers", json=body | {"accept_lost_buffer": True})
        assert opened.json()["durable_step"] == 3
        assert "groups in flight since are gone, and the order of prompts begins anew" in caplog.text
        again = await service.client.post("/v1/trainers", json=body)
        assert again.status_code == 200, "the buffer knows the steps now"
        epoch = str(again.json()["trainer_epoch"])
        headers = {"April-Trainer-Epoch": epoch, "Accept": "application/vnd.april.batch"}
        assert (await service.batch(4, headers)).header.step == 4


async def test_a_step_that_was_never_leased_is_not_published(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        body = {"step": 9, "path": service.write_weights(9)}
        response = await service.client.post("/v1/policies", json=body, headers=headers)
        status = (await service.client.get("/v1/status")).json()
    assert response.status_code == 409
    assert status["newest_version"] == 0


async def test_restored_weights_are_no_new_version_when_they_are_the_newest(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        await service.batch(1, headers)
        assert await service.publish(1, headers) == 1
        headers = await service.open_trainer(durable_step=1)
        copy = service.parts.settings.weights_root / "again"
        shutil.copytree(service.parts.settings.weights_root / "step-1", copy)
        body = {"step": 1, "path": "again"}
        assert (await service.client.post("/v1/policies", json=body, headers=headers)).json()["version"] == 1


async def test_an_evaluation_waits_for_the_version_that_it_was_asked_for(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        started = (await service.client.post("/v1/evaluations", json={"version": 2})).json()
        await train_steps(service, headers, 3)
        await service.until(lambda: service.parts.evaluations.get(started["id"]).state != "running")
        found = service.parts.evaluations.get(started["id"])
    assert found.state == "done"
    assert found.version >= 2


async def test_waiting_for_a_batch_ends_when_the_service_stops(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        await service.client.post("/v1/pause")
        await service.batch(1, headers) if service.parts.loop.snapshot.offered else None
        body = {"step": 1 + service.parts.loop.snapshot.outstanding, "wait_s": 60}
        waiting = asyncio.create_task(service.client.post("/v1/batches", json=body, headers=headers))
        await asyncio.sleep(0)
        await service.parts.delivery.stop()
        assert (await waiting).status_code in (503, 409)


async def test_a_full_buffer_is_waited_for(tmp_path):
    settings = service_settings(tmp_path, buffer={"max_groups": 5}, rollout={"lookahead": 0})
    buffer = MemoryBuffer(limits=limits_of(settings))
    async with running_service(settings, buffer) as service:
        headers = await service.open_trainer()
        for batch in await train_steps(service, headers, 3):
            check_provenance(batch)
        snapshot = await service.parts.buffer.snapshot()
    assert snapshot.held_groups <= 5
    assert snapshot.ledger.error == 0
