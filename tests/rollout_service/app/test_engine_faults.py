"""Engines that die of a prompt, or hang; leases that nobody renews; a store that is full."""

import asyncio
from collections.abc import Sequence

import pytest

from buffer.interface import CursorMove, NewGroup
from buffer.memory import MemoryBuffer
from protocol.errors import BufferFullError
from protocol.samples import Group
from rollout_service import loop as loop_module
from rollout_service.prompts.interface import START_CURSOR
from rollout_service.samples import renew_leases
from tests.support.provenance import check_provenance, train_steps
from tests.support.service import running_service, service_settings

pytestmark = pytest.mark.timeout(120)


def prompt_number(token_ids: Sequence[int]) -> int:
    """Of the prompts that the test service has: they are 1, 2, 3 + number."""
    return token_ids[2] - 3


async def test_a_prompt_that_kills_engines_is_found_and_nobody_else_fails(tmp_path):
    settings = service_settings(tmp_path, rollout={"n": 4, "ratio": 2.0})
    async with running_service(settings) as service:
        prompts, _ = service.parts.loop._admission._prompts.take(START_CURSOR, 12)
        killer = prompt_number(prompts[11].token_ids)  # the first round takes eight
        engine = service.engines[0]
        engine.faults.deadly = lambda request: prompt_number(request.prompt_token_ids) == killer
        batches = await train_steps(service, await service.open_trainer(), 6)
        status = (await service.client.get("/v1/status")).json()
    assert status["ledger_error"] == 0
    assert status["ledger"]["dropped"] == 1
    assert status["counters"]["failed:engine_died"] >= 1
    assert "failed:engine_error" not in status["counters"]
    assert engine.stats().num_restarts <= 3 + 5  # three deaths of its own, and log2 of the groups that run beside it
    for batch in batches:
        check_provenance(batch)
        assert f"p:{killer}" not in {group.prompt_id for group in batch.header.groups}
        assert not any(group.failed for group in batch.header.groups)


async def test_a_prompt_in_quarantine_is_dropped_when_it_comes_again(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        service.parts.loop._admission._quarantined.update(f"p:{i}" for i in range(0, 1000, 2))
        batches = await train_steps(service, await service.open_trainer(), 4)
        status = (await service.client.get("/v1/status")).json()
    assert status["counters"]["dropped:quarantined"] > 0
    assert status["ledger_error"] == 0
    admitted_before = 8  # what the service admitted before the test could tell it
    served = [group.prompt_id for batch in batches for group in batch.header.groups]
    assert sum(int(prompt.split(":")[1]) % 2 == 0 for prompt in served) <= admitted_before


async def test_an_engine_that_hangs_is_restarted(tmp_path, monkeypatch):
    monkeypatch.setattr(loop_module, "WATCH_INTERVAL_S", 0.02)
    async with running_service(service_settings(tmp_path, engine={"stall_timeout_s": 0.2})) as service:
        watching = asyncio.create_task(service.parts.loop.watch())
        engine = service.engines[0]
        engine.faults.hangs = True
        await service.until(lambda: engine.stats().num_restarts == 1)
        engine.faults.hangs = False
        engine._work.set()
        for batch in await train_steps(service, await service.open_trainer(), 2):
            check_provenance(batch)
        watching.cancel()


async def test_a_sample_whose_lease_nobody_renews_goes_on(tmp_path):
    settings = service_settings(tmp_path, buffer={"sample_lease_s": 1.0})
    async with running_service(settings) as service:
        parts = service.parts.sample_parts
        await service.client.post("/v1/pause")
        await service.until(lambda: service.parts.loop.safe_to_stop)
        lost = [brief.sample_id for brief in await parts.buffer.open_samples()][:3]
        await parts.buffer.start(lost, "a-worker-that-died", 0.001)
        renewing = asyncio.create_task(renew_leases(parts, service.parts.loop.leases))
        await asyncio.sleep(0.4)
        await service.client.post("/v1/resume")
        for batch in await train_steps(service, await service.open_trainer(), 3):
            check_provenance(batch)
        snapshot = await parts.buffer.snapshot()
        renewing.cancel()
    assert snapshot.counters["leases_expired"] == len(lost)
    assert snapshot.ledger.error == 0


async def test_a_sample_whose_leases_expire_again_and_again_fails(tmp_path):
    settings = service_settings(
        tmp_path, buffer={"sample_lease_s": 0.3}, rollout={"max_sample_failures": 2, "min_group_samples": 1}
    )
    buffer = MemoryBuffer()
    async with running_service(settings, buffer) as service:
        parts = service.parts.sample_parts
        await service.client.post("/v1/pause")
        await service.until(lambda: service.parts.loop.safe_to_stop)
        (first, *_) = await parts.buffer.open_samples()
        await parts.buffer.start([first.sample_id], "a-worker-that-died", 0.001)
        await asyncio.sleep(0.005)
        assert await parts.buffer.park_expired(10) == [first.sample_id]
        await parts.buffer.start([first.sample_id], "a-worker-that-died", 0.001)
        renewing = asyncio.create_task(renew_leases(parts, service.parts.loop.leases))
        await service.until(lambda: buffer.store.counters["failed:lease_expired"] == 1)
        await service.client.post("/v1/resume")
        for batch in await train_steps(service, await service.open_trainer(), 3):
            check_provenance(batch)
        snapshot = await parts.buffer.snapshot()
        renewing.cancel()
    assert snapshot.ledger.error == 0


class FullBuffer(MemoryBuffer):
    """Has no room for new groups at first."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals_left = 2

    async def admit(self, groups: Sequence[NewGroup], version: int, cursor: CursorMove) -> list[Group]:
        if self.refusals_left:
            self.refusals_left -= 1
            raise BufferFullError("no memory left")
        return await super().admit(groups, version, cursor)


async def test_a_full_store_is_asked_again_later(tmp_path, monkeypatch):
    monkeypatch.setattr(loop_module, "WATCH_INTERVAL_S", 0.02)
    buffer = FullBuffer()
    async with running_service(service_settings(tmp_path), buffer) as service:
        watching = asyncio.create_task(service.parts.loop.watch())
        for batch in await train_steps(service, await service.open_trainer(), 2):
            check_provenance(batch)
        watching.cancel()
    assert buffer.refusals_left == 0


async def test_the_age_of_what_waits_longest_is_told(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        await service.until(lambda: service.engines[0].stats().tokens_generated > 0)
        await service.client.post("/v1/pause")
        await service.until(lambda: service.parts.loop.safe_to_stop)
        first = (await service.client.get("/v1/status")).json()["oldest_waiting_s"]
        await asyncio.sleep(0.05)
        later = (await service.client.get("/v1/status")).json()["oldest_waiting_s"]
        text = (await service.client.get("/metrics")).text
    assert later >= first + 0.05
    assert "april_oldest_waiting_seconds" in text
