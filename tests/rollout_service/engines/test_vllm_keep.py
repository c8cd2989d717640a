"""Installs under running requests (`keep`), a killed core and its restart, on the real engine."""

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio

from protocol.errors import EngineDeadError, WeightsError
from rollout_service.engines.interface import StreamEnd
from rollout_service.engines.vllm_engine import VllmEngine
from tests.support.engines import (
    Reference,
    collect,
    engine_settings,
    generate_all,
    make_policy,
    random_prompts,
    request,
    until,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = random_prompts(16, 12, seed=4)
MAX_MEAN_LOGPROB_ERROR = 1e-4


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("policies")
    return [make_policy(root / f"policy-{seed}", seed) for seed in range(3)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(vllm_loaded, policies):
    settings = engine_settings(policies[0], max_num_seqs=32, enable_prefix_caching=False, on_install="keep")
    engine = VllmEngine(settings, "engine-keep")
    await engine.start()
    yield engine
    await engine.close()


async def test_tokens_before_and_after_an_install_carry_the_version_that_wrote_them(engine, policies):
    """Each side of the switch has the log-probs of its own weights, whatever the reader's speed."""
    slow_down = asyncio.Event()
    streams = [
        asyncio.create_task(_collect_slowly(engine, i, slow_down if i % 2 else None)) for i in range(len(PROMPTS))
    ]
    await until(lambda: engine.stats().tokens_generated >= 15 * len(PROMPTS) // 2)
    await engine.install(policies[1], 5)
    slow_down.set()
    collected = await asyncio.gather(*streams)
    assert engine.stats().version == 5
    crossed = [i for i, item in enumerate(collected) if set(item.versions) == {0, 5}]
    assert len(crossed) >= 8
    old = Reference(policies[0])
    for i in crossed:
        item = collected[i]
        switch = item.versions.index(5)
        assert item.versions == [0] * switch + [5] * (len(item.versions) - switch)
        assert all(chunk.kv_kept == (chunk.version == 5) for chunk in item.chunks if len(chunk.tokens))
        by_old = old.logprobs(PROMPTS[i], item.tokens, 1.0)
        errors = np.abs(item.logprobs - by_old)
        assert np.mean(errors[:switch]) <= MAX_MEAN_LOGPROB_ERROR
        # The old weights could not have written what follows: the label is not a token too late either.
        assert errors[switch] > 10 * MAX_MEAN_LOGPROB_ERROR


async def test_requests_after_the_install_are_not_marked_as_kept(engine, policies):
    (sample,) = await generate_all(engine, [request("fresh@1", PROMPTS[0], 40)])
    assert set(sample.versions) == {5}
    assert not any(chunk.kv_kept for chunk in sample.chunks)
    errors = np.abs(sample.logprobs - Reference(policies[1]).logprobs(PROMPTS[0], sample.tokens, 1.0))
    assert np.mean(errors) <= MAX_MEAN_LOGPROB_ERROR


async def test_requests_that_come_during_a_hold_wait_and_can_be_aborted(engine):
    await engine.hold()
    waiting = asyncio.create_task(collect(engine.generate(request("waiting@1", PROMPTS[1], 8))))
    unwanted = asyncio.create_task(collect(engine.generate(request("unwanted@1", PROMPTS[1], 8))))
    await until(lambda: engine.stats().num_running >= 2)
    await engine.abort(["unwanted@1"])
    assert (await asyncio.wait_for(unwanted, 10)).end is StreamEnd.ABORT
    assert not waiting.done()
    await engine.release()
    assert len((await asyncio.wait_for(waiting, 30)).tokens) == 8


async def test_a_refused_install_lets_running_requests_go_on_with_the_old_weights(engine, policies, tmp_path):
    stream = asyncio.create_task(collect(engine.generate(request("going@1", PROMPTS[2], 96))))
    await until(lambda: engine.stats().num_running > 0)
    with pytest.raises(WeightsError):
        await engine.install(tmp_path, 6)
    sample = await stream
    assert set(sample.versions) == {5}
    errors = np.abs(sample.logprobs - Reference(policies[1]).logprobs(PROMPTS[2], sample.tokens, 1.0))
    assert np.mean(errors) <= MAX_MEAN_LOGPROB_ERROR


@pytest.mark.slow
async def test_a_killed_core_ends_every_stream_and_comes_back_with_the_active_version(engine, policies):
    streams = [asyncio.create_task(collect(engine.generate(request(f"dying-{i}@1", PROMPTS[i], 96)))) for i in range(8)]
    await until(lambda: engine.stats().num_running >= 8)
    (core,) = engine.process_ids
    os.kill(core, signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 60)
    assert all(isinstance(result, EngineDeadError) for result in results)
    assert not engine.stats().alive
    with pytest.raises(EngineDeadError):
        await engine.install(policies[2], 9)
    await engine.restart(policies[1], 5)
    stats = engine.stats()
    assert (stats.alive, stats.version, stats.epoch, stats.num_restarts) == (True, 5, 2, 1)
    (sample,) = await generate_all(engine, [request("again@1", PROMPTS[0], 40)])
    errors = np.abs(sample.logprobs - Reference(policies[1]).logprobs(PROMPTS[0], sample.tokens, 1.0))
    assert np.mean(errors) <= MAX_MEAN_LOGPROB_ERROR
    assert not psutil.pid_exists(core)


@pytest.mark.slow
async def test_a_core_that_hangs_is_ended_and_comes_back(engine, policies):
    streams = [asyncio.create_task(collect(engine.generate(request(f"stuck-{i}@1", PROMPTS[i], 96)))) for i in range(4)]
    await until(lambda: engine.stats().num_running >= 4)
    (core,) = engine.process_ids
    os.kill(core, signal.SIGSTOP)
    await asyncio.wait_for(engine.close(), 60)
    results = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 60)
    assert all(isinstance(result, EngineDeadError) for result in results)
    assert not psutil.pid_exists(core)
    await engine.restart(policies[1], 6)
    (sample,) = await generate_all(engine, [request("unstuck@1", PROMPTS[0], 40)])
    errors = np.abs(sample.logprobs - Reference(policies[1]).logprobs(PROMPTS[0], sample.tokens, 1.0))
    assert np.mean(errors) <= MAX_MEAN_LOGPROB_ERROR


async def _collect_slowly(engine: VllmEngine, index: int, until: asyncio.Event | None):
    """A reader that, if told so, takes nothing from its third chunk to the event: vLLM merges what it leaves unread."""
    from tests.support.engines import Collected

    collected = Collected()
    async for chunk in engine.generate(request(f"kept-{index}@1", PROMPTS[index], 96)):
        collected.chunks.append(chunk)
        if until is not None and len(collected.chunks) == 3:
            await until.wait()
    return collected
