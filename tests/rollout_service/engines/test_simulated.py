"""The engine without a model: it keeps the same contract, and its tokens prove loss, duplication and mislabelling."""

import asyncio
import time

import numpy as np
import pytest
import pytest_asyncio

from protocol.errors import EngineDeadError, EngineError, WeightsError
from protocol.manifest import write_manifest
from protocol.settings.run import RunSettings
from protocol.settings.trainer import ModelSettings
from rollout_service.engines.interface import StreamEnd
from rollout_service.engines.simulated import (
    END_TOKEN,
    NUM_TOKENS,
    SimulatedEngine,
    simulated_length,
    simulated_logprobs,
    simulated_tokens,
)
from tests.support.simulated import Collected, collect, request, until


def settings(slots: int = 8, **simulated: float) -> RunSettings:
    fast = {"step_base_s": 0.0, "step_per_sequence_s": 0.00005, "prefill_per_token_s": 0.0} | simulated
    return RunSettings.model_validate(
        {
            "data": {"max_prompt_length": 64, "max_response_length": 4000},
            "engine": {"backend": "simulated", "max_num_seqs": slots, "simulated": fast},
        }
    )


@pytest_asyncio.fixture
async def engine():
    engine = SimulatedEngine(settings(), "engine-0", lengths=lambda _: 300)
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
def published(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    write_manifest(tmp_path, step=1)
    return tmp_path


def check_provenance(sample_id: str, collected: Collected, start: int = 0) -> None:
    """Every token and log-prob is what its labelled version writes at its position."""
    position = start
    for chunk in collected.chunks:
        count = len(chunk.tokens)
        expected = simulated_tokens(sample_id, position, count, chunk.version)
        if chunk.end is StreamEnd.STOP:
            expected[-1] = END_TOKEN
        assert np.array_equal(chunk.tokens, expected)
        assert np.array_equal(chunk.logprobs, simulated_logprobs(sample_id, position, count, chunk.version))
        position += count


def test_tokens_depend_on_sample_position_and_version():
    assert not np.array_equal(simulated_tokens("a", 0, 50, 0), simulated_tokens("b", 0, 50, 0))
    assert not np.array_equal(simulated_tokens("a", 0, 50, 0), simulated_tokens("a", 0, 50, 1))
    assert np.array_equal(simulated_tokens("a", 0, 50, 0)[20:], simulated_tokens("a", 20, 30, 0))
    assert len(set(simulated_tokens("a", 0, 1000, 0).tolist())) > 900
    logprobs = simulated_logprobs("a", 0, 1000, 0)
    assert np.all(logprobs <= 0)
    assert np.isfinite(logprobs).all()


def test_lengths_are_lognormal_and_belong_to_the_sample():
    lengths = np.array([simulated_length(0, f"s{i}", 100.0, 1.0) for i in range(4000)])
    assert 90 < np.median(lengths) < 110
    assert 8 < np.percentile(lengths, 99) / np.median(lengths) < 13  # exp(2.33) = 10.2
    assert simulated_length(0, "s1", 100.0, 1.0) == lengths[1]
    assert simulated_length(1, "s1", 100.0, 1.0) != lengths[1]


def test_what_goes_on_under_another_id_is_as_long_as_those_that_get_so_far():
    alone = np.array([simulated_length(0, f"a{i}", 100.0, 1.0) for i in range(20_000)])
    resumed = np.array([simulated_length(0, f"b{i}", 100.0, 1.0, longer_than=150) for i in range(4000)])
    assert resumed.min() > 150
    for share in (50, 90, 99):
        assert np.percentile(resumed, share) == pytest.approx(np.percentile(alone[alone > 150], share), rel=0.15)
    for i, length in enumerate(resumed[:200]):  # parked once more, and by its own id from the start: it ends there, too
        assert simulated_length(0, f"b{i}", 100.0, 1.0, longer_than=int(length) - 1) == length
    assert all(simulated_length(0, f"a{i}", 100.0, 1.0, longer_than=int(n) - 1) == n for i, n in enumerate(alone[:200]))
    assert simulated_length(0, "a", 100.0, 0.0, longer_than=100) == 101, "where nobody gets so far, it ends"


async def test_a_whole_response(engine):
    whole = await collect(engine.generate(request("a@1", 4000)))
    assert (len(whole.tokens), whole.end, whole.tokens[-1]) == (300, StreamEnd.STOP, END_TOKEN)
    check_provenance("a", whole)
    short = await collect(engine.generate(request("a@2", 299)))
    assert (len(short.tokens), short.end) == (299, StreamEnd.LENGTH)
    exact = await collect(engine.generate(request("a@3", 300)))
    assert (len(exact.tokens), exact.end) == (300, StreamEnd.STOP)


async def test_a_resumed_response_has_the_length_it_would_have_had(engine):
    parked = Collected()
    async for chunk in engine.generate(request("a@1", 4000)):
        parked.chunks.append(chunk)
        if len(parked.tokens) >= 100 and chunk.end is None:
            await engine.abort(["a@1"])
    assert parked.end is StreamEnd.ABORT
    rest = await collect(engine.generate(request("a@2", 4000, prefix=parked.tokens)))
    assert (rest.end, len(parked.tokens) + len(rest.tokens)) == (StreamEnd.STOP, 300)
    check_provenance("a", parked)
    check_provenance("a", rest, start=len(parked.tokens))


async def test_no_more_than_the_slots_run_and_the_rest_wait_in_order(engine):
    first_tokens: list[str] = []

    async def follow(name: str) -> Collected:
        collected = Collected()
        async for chunk in engine.generate(request(name, 50)):
            if not collected.chunks:
                first_tokens.append(name)
            collected.chunks.append(chunk)
        return collected

    names = [f"s{i}@1" for i in range(24)]
    results = await asyncio.gather(*(follow(name) for name in names))
    assert all(len(item.tokens) == 50 for item in results)
    assert [set(first_tokens[i : i + 8]) for i in (0, 8, 16)] == [set(names[i : i + 8]) for i in (0, 8, 16)]


async def test_abort_before_during_and_in_the_queue(engine):
    await engine.abort(["early@1"])
    assert (await collect(engine.generate(request("early@1", 100)))).end is StreamEnd.ABORT
    streams = [asyncio.create_task(collect(engine.generate(request(f"s{i}@1", 4000)))) for i in range(12)]
    await until(lambda: engine.stats().tokens_generated >= 100)
    await engine.abort([f"s{i}@1" for i in range(12)])
    results = await asyncio.gather(*streams)
    assert all(item.end is StreamEnd.ABORT for item in results)
    for index, item in enumerate(results):
        check_provenance(f"s{index}", item)
    await asyncio.wait_for(engine.wait_idle(), 5)
    assert (await collect(engine.generate(request("after@1", 10)))).tokens, "slots are free again"


async def test_an_install_under_running_requests_labels_every_token(engine, published):
    stream = asyncio.create_task(collect(engine.generate(request("a@1", 4000))))
    await until(lambda: engine.stats().tokens_generated >= 50)
    await engine.install(published, 4)
    item = await stream
    assert set(item.versions) == {0, 4}
    check_provenance("a", item)
    assert all(chunk.kv_kept == (chunk.version == 4) for chunk in item.chunks)
    await engine.revert()
    assert engine.stats().version == 0


async def test_a_failed_install_changes_nothing(engine, published):
    engine.faults.fail_install = "disk on fire"
    with pytest.raises(EngineError, match="disk on fire"):
        await engine.install(published, 4)
    (published / "model.safetensors").write_bytes(b"others!")
    with pytest.raises(WeightsError, match="checksum"):
        await engine.install(published, 4)
    assert engine.stats().version == 0
    assert set((await collect(engine.generate(request("a@1", 20)))).versions) == {0}


async def test_a_failing_request_and_a_dying_engine(engine, published):
    engine.faults.fail_requests["bad"] = 1
    with pytest.raises(EngineError, match="as it was told to"):
        await collect(engine.generate(request("bad@1", 20)))
    assert len((await collect(engine.generate(request("bad@2", 20)))).tokens) == 20
    stream = asyncio.create_task(collect(engine.generate(request("a@1", 4000))))
    await until(lambda: engine.stats().tokens_generated >= 50)
    engine.die()
    with pytest.raises(EngineDeadError):
        await stream
    assert not engine.stats().alive
    await engine.restart(published, 7)
    stats = engine.stats()
    assert (stats.alive, stats.version, stats.epoch, stats.num_restarts) == (True, 7, 2, 1)
    assert set((await collect(engine.generate(request("a@2", 20)))).versions) == {7}


async def test_the_cost_of_a_token_does_not_grow_with_the_sequences():
    few, many = await _cpu_per_token(500), await _cpu_per_token(10_000)
    assert many < 5 * few


async def _cpu_per_token(num_sequences: int) -> float:
    per_sequence_s = 0.1 / num_sequences  # a step of 100 ms: every sequence is woken for every token
    engine = SimulatedEngine(settings(num_sequences, step_per_sequence_s=per_sequence_s), "e", lengths=lambda _: 8)
    await engine.start()
    begun = time.process_time()
    results = await asyncio.gather(*(collect(engine.generate(request(f"s{i}@1", 9))) for i in range(num_sequences)))
    used = time.process_time() - begun
    await engine.close()
    assert all((len(item.tokens), item.end) == (8, StreamEnd.STOP) for item in results)
    print(f"{num_sequences} sequences: {1e6 * used / (8 * num_sequences):.0f} us of CPU per token")
    return used / (8 * num_sequences)


@pytest.mark.parametrize(
    ("config", "most"),
    [('{"vocab_size": 40}', 39), ('{"text_config": {"vocab_size": 40}}', 39), ('{"vocab_size": 1000000}', NUM_TOKENS),
     ("{}", NUM_TOKENS), ("no JSON", NUM_TOKENS), (None, NUM_TOKENS)],
)  # fmt: skip
async def test_it_writes_no_token_that_the_model_does_not_know(tmp_path, config, most):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    told = settings().model_copy(update={"model": ModelSettings(path=tmp_path)})
    engine = SimulatedEngine(told, "engine-0", lengths=lambda _: 3000)
    await engine.start()
    collected = await collect(engine.generate(request("a", max_tokens=3000)))
    await engine.close()
    assert max(collected.tokens) <= most
    assert max(collected.tokens) > 0.9 * most
