"""Several replicas as one: where requests go, and weights that change on all of them or on none."""

import asyncio

import pytest
import pytest_asyncio

from protocol.errors import EngineDeadError, EngineError, SettingsError, WeightsError
from protocol.manifest import write_manifest
from protocol.settings.run import RunSettings
from rollout_service.engines.interface import StreamEnd
from rollout_service.engines.pool import EnginePool, build_pool
from rollout_service.engines.simulated import SimulatedEngine
from tests.support.simulated import collect, request, until


def settings(**engine) -> RunSettings:
    timing = {"step_base_s": 0.0, "step_per_sequence_s": 0.0001, "prefill_per_token_s": 0.0, "install_s": 0.01}
    return RunSettings.model_validate(
        {
            "data": {"max_prompt_length": 64, "max_response_length": 4000},
            "engine": {"backend": "simulated", "max_num_seqs": 4, "simulated": timing} | engine,
        }
    )


@pytest_asyncio.fixture
async def engines():
    return [SimulatedEngine(settings(), f"engine-{i}", lengths=lambda _: 3000) for i in range(3)]


@pytest_asyncio.fixture
async def pool(engines):
    pool = EnginePool(engines)
    await pool.start()
    yield pool
    await pool.close()


@pytest.fixture
def published(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    write_manifest(tmp_path, step=1)
    return tmp_path


async def running(pool, names):
    """Streams of these requests, each past its first token."""
    streams = [asyncio.create_task(collect(pool.generate(request(name, 3000)))) for name in names]
    await until(lambda: sum(stats.tokens_generated for stats in pool.stats()) >= 20 * len(names))
    return streams


def versions(pool) -> list[int]:
    return [stats.version for stats in pool.stats()]


async def test_requests_spread_over_the_free_slots_and_free_them(pool):
    assert (pool.slots, pool.free_slots, pool.workers) == (12, 12, ["engine-0", "engine-1", "engine-2"])
    workers = [pool.assign(f"s{i}@1") for i in range(9)]
    assert sorted(workers) == sorted([f"engine-{i}" for i in range(3)] * 3)
    assert pool.free_slots == 3
    pool.unassign("s0@1")
    pool.unassign("s0@1")
    assert pool.free_slots == 4
    with pytest.raises(EngineError, match="assigned already"):
        pool.assign("s1@1")
    streams = [asyncio.create_task(collect(pool.generate(request(f"s{i}@1", 20)))) for i in range(1, 9)]
    await asyncio.gather(*streams)
    assert pool.free_slots == 12


async def test_aborts_reach_the_replica_that_has_the_request(pool):
    names = [f"s{i}@1" for i in range(6)]
    await pool.abort(["early@1"])
    streams = await running(pool, names)
    await pool.abort(names[:3])
    assert all(item.end is StreamEnd.ABORT for item in await asyncio.gather(*streams[:3]))
    assert not any(stream.done() for stream in streams[3:])
    assert (await collect(pool.generate(request("early@1", 10)))).end is StreamEnd.ABORT
    await pool.abort(names)
    await asyncio.wait_for(pool.wait_idle(), 5)
    await asyncio.gather(*streams)
    assert pool.free_slots == 12


async def test_an_install_is_on_every_replica(pool, published):
    await pool.install(published, 4)
    assert (pool.version, versions(pool)) == (4, [4, 4, 4])


async def test_an_install_that_fails_on_one_replica_happened_on_none(pool, engines, published):
    await pool.install(published, 4)
    streams = await running(pool, [f"s{i}@1" for i in range(6)])
    engines[1].faults.fail_install = "out of memory"
    with pytest.raises(EngineError, match=r"engine-1: .*out of memory"):
        await pool.install(published, 5)
    assert (pool.version, versions(pool)) == (4, [4, 4, 4])
    written = await asyncio.gather(*streams)
    assert {version for item in written for version in item.versions} == {4}, "no token of the failed version"


async def test_unfit_weights_are_refused_before_anything_is_held(pool, published):
    (published / "model.safetensors").write_bytes(b"others!")
    with pytest.raises(WeightsError, match=r"engine-0: .*checksum"):
        await pool.install(published, 5)
    assert (pool.version, versions(pool)) == (0, [0, 0, 0])


async def test_a_replica_that_cannot_go_back_is_closed_and_restarted(pool, engines, published, monkeypatch):
    async def broken() -> None:
        raise EngineError("no way back")

    monkeypatch.setattr(engines[0], "revert", broken)
    engines[1].faults.fail_install = "out of memory"
    with pytest.raises(EngineError, match="out of memory"):
        await pool.install(published, 5)
    assert [stats.alive for stats in pool.stats()] == [False, True, True]
    assert await pool.restart_dead() == ["engine-0"]
    assert (pool.version, versions(pool)) == (0, [0, 0, 0])


async def test_a_dead_replica_is_avoided_and_comes_back_with_the_active_version(pool, engines, published):
    streams = await running(pool, [f"s{i}@1" for i in range(6)])
    engines[2].die()
    results = await asyncio.gather(*streams, return_exceptions=True)
    assert sum(isinstance(result, EngineDeadError) for result in results) == 2
    assert (pool.slots, pool.free_slots) == (8, 8)
    assert {pool.assign(f"t{i}@1") for i in range(8)} == {"engine-0", "engine-1"}
    await pool.install(published, 4)
    assert versions(pool)[:2] == [4, 4]
    assert await pool.restart_dead() == ["engine-2"]
    assert versions(pool) == [4, 4, 4]
    assert pool.stats()[2].num_restarts == 1
    assert await pool.restart_dead() == []


async def test_a_pool_without_a_living_replica_says_so(pool, engines, published):
    for engine in engines:
        engine.die()
    with pytest.raises(EngineDeadError, match="restart"):
        pool.assign("s@1")
    with pytest.raises(EngineDeadError, match="restart"):
        await pool.install(published, 4)


async def test_start_is_all_or_nothing(engines, monkeypatch):
    async def fails() -> None:
        raise EngineError("no model")

    monkeypatch.setattr(engines[1], "start", fails)
    with pytest.raises(EngineError, match="no model"):
        await EnginePool(engines).start()
    assert not any(engine.stats().alive for engine in engines)


def test_build_pool_takes_backend_and_number_from_the_settings():
    assert build_pool(settings(num_replicas=2)).workers == ["engine-0", "engine-1"]
    with pytest.raises(SettingsError, match=r"model\.path"):
        build_pool(settings(backend="local"))


def test_worker_ids_are_unique():
    twice = [SimulatedEngine(settings(), "same"), SimulatedEngine(settings(), "same")]
    with pytest.raises(EngineError, match="same worker id"):
        EnginePool(twice)
