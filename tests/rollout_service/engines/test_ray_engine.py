"""The engine in a Ray actor keeps the same contract."""

import asyncio
import os
import signal

import numpy as np
import pytest

from protocol.errors import EngineDeadError, WeightsError
from rollout_service.engines.interface import StreamEnd
from rollout_service.engines.ray_engine import RayEngine
from tests.support.engines import Reference, collect, engine_settings, generate_all, make_policy, request, until

MAX_MEAN_LOGPROB_ERROR = 1e-4

pytestmark = [
    pytest.mark.slow,
    # Ray leaves sockets, files and its own subprocess to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture
def ray_stopped():
    import ray

    yield
    ray.shutdown()


async def test_a_replica_in_an_actor(ray_stopped, tmp_path):
    base, new = make_policy(tmp_path / "base", 0), make_policy(tmp_path / "new", 1)
    engine = RayEngine(engine_settings(base, max_num_seqs=8), "engine-ray")
    await engine.start()
    try:
        await _check_generation(engine, Reference(base))
        await _check_install(engine, new, tmp_path)
        await _check_death(engine, new)
    finally:
        await engine.close()


async def _check_generation(engine: RayEngine, reference: Reference) -> None:
    (sample,) = await generate_all(engine, [request("a@1", [1, 2, 3], 48, 0.8)])
    assert np.mean(np.abs(sample.logprobs - reference.logprobs([1, 2, 3], sample.tokens, 0.8))) < MAX_MEAN_LOGPROB_ERROR
    (whole,) = await generate_all(engine, [request("b@1", [5, 6], 96, 0.0)])
    await engine.abort(["early@1"])
    assert (await collect(engine.generate(request("early@1", [1], 8)))).end is StreamEnd.ABORT
    streams = [asyncio.create_task(collect(engine.generate(request(f"c{i}@1", [5, 6], 96, 0.0)))) for i in range(8)]
    before = engine.stats().tokens_generated
    await until(lambda: engine.stats().tokens_generated >= before + 40)
    await engine.abort([f"c{i}@1" for i in range(8)])
    parked = await asyncio.gather(*streams)
    assert StreamEnd.ABORT in {item.end for item in parked}
    for item in parked:
        assert item.tokens == whole.tokens[: len(item.tokens)]
    left = engine.generate(request("left@1", [5, 6], 96))
    await anext(left)
    await left.aclose()
    await asyncio.wait_for(engine.wait_idle(), 10)


async def _check_install(engine: RayEngine, new, tmp_path) -> None:
    with pytest.raises(WeightsError, match="manifest"):
        await engine.install(tmp_path, 2)
    await engine.install(new, 3)
    assert engine.stats().version == 3
    (sample,) = await generate_all(engine, [request("d@1", [1, 2, 3], 48, 0.8)])
    assert set(sample.versions) == {3}
    error = np.abs(sample.logprobs - Reference(new).logprobs([1, 2, 3], sample.tokens, 0.8))
    assert np.mean(error) < MAX_MEAN_LOGPROB_ERROR


async def _check_death(engine: RayEngine, new) -> None:
    stream = asyncio.create_task(collect(engine.generate(request("e@1", [1], 96))))
    await until(lambda: engine.stats().num_running > 0)
    (core,) = await engine.process_ids()
    os.kill(core, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(stream, 60)
    await asyncio.wait_for(until(lambda: not engine.stats().alive), 60)
    await engine.restart(new, 3)
    stats = engine.stats()
    assert (stats.alive, stats.version, stats.num_restarts) == (True, 3, 1)
    assert len((await collect(engine.generate(request("f@1", [1], 8)))).tokens) > 0
