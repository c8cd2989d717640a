"""The service with `rollout.samples_ratio` above 1, on the simulated engine and the in-memory buffer."""

import asyncio
import hashlib
import logging

import numpy as np
import pytest

from buffer.embedded import EmbeddedRedis
from buffer.memory import MemoryBuffer
from buffer.open import limits_of
from buffer.redis_buffer import RedisBuffer
from protocol.states import SampleState
from rollout_service.engines.simulated import simulated_logprobs, simulated_tokens
from rollout_service.pools import length_bias
from rollout_service.prompts.interface import PromptSet
from tests.support import service as support
from tests.support.provenance import train_steps
from tests.support.service import running_service, service_settings

pytestmark = pytest.mark.timeout(120)


class NotingBuffer(MemoryBuffer):
    """Remembers which sample went on as which, and how many tokens it had by then."""

    def __init__(self):
        super().__init__()
        self.origin = {}

    async def admit(self, *args, **kwargs):
        groups = await super().admit(*args, **kwargs)
        for sample in (s for g in groups for s in g.samples if s.continued_from):
            self.origin[sample.sample_id] = (sample.continued_from, sample.num_tokens)
        return groups


def length(sample_id):
    """Half of the samples are short."""
    digest = hashlib.blake2b(sample_id.encode(), digest_size=1).digest()[0]
    return 4 if digest % 2 else 40


@pytest.fixture
def few_prompts(monkeypatch):
    """Epochs of eight prompts."""

    def make(train, validation, num_filtered):
        return PromptSet(train[:8], validation, num_filtered)

    monkeypatch.setattr(support, "PromptSet", make)


def racing(tmp_path, **rollout):
    given = {"n": 2, "samples_ratio": 2.0, "ratio": 1.0, "lookahead": 0, "max_lag": 4}
    return service_settings(tmp_path, rollout=given | rollout)


def written_as(buffer, sample_id, position):
    """Under which id the token at a position of a response was written."""
    while sample_id in buffer.origin and position < buffer.origin[sample_id][1]:
        sample_id = buffer.origin[sample_id][0]
    return sample_id


def check_tokens(buffer, batch):
    """Every token is the one that its version writes at its place, under the id that the sample had then."""
    for index, sample in enumerate(batch.header.samples):
        begin, end = batch.sample_offsets[index : index + 2]
        begin += batch.prompt_lengths[index]
        for span in sample.segments:
            for place in range(span.start, span.end):
                writer = written_as(buffer, sample.sample_id, place)
                last = begin + place == end - 1 and sample.finish_reason == "stop"
                expected = simulated_tokens(writer, place, 1, span.version)[0]
                assert last or batch.tokens[begin + place] == expected
                np.testing.assert_equal(
                    batch.logprobs[begin + place], simulated_logprobs(writer, place, 1, span.version)[0]
                )


async def test_the_fastest_make_the_group_and_the_others_go_on_next_epoch(tmp_path, few_prompts, caplog):
    buffer = NotingBuffer()
    with caplog.at_level(logging.WARNING):
        async with running_service(racing(tmp_path), buffer, lengths=length) as service:
            headers = await service.open_trainer()
            batches = await train_steps(service, headers, 16)
            await service.client.post("/v1/drain")
            await service.until(lambda: service.parts.loop.safe_to_stop)
            status = (await service.client.get("/v1/status")).json()
            metrics = (await service.client.get("/metrics")).text
    for batch in batches:
        assert batch.num_samples == 8
        check_tokens(buffer, batch)
        versions = batch.versions[batch.loss_mask == 1]
        assert (batch.header.policy_version - versions).max() <= 4
    trained = [s.sample_id for b in batches for s in b.header.samples]
    assert len(set(trained)) == len(trained)
    assert len(buffer.origin.keys() & set(trained)) > 4
    pool = status["pool"]
    assert pool["continued"] == len(buffer.origin) > 8
    assert pool["entered"] == pool["pooled"] + pool["continued"] + sum(pool["expired"].values())
    assert (status["ledger_error"], status["pool_error"]) == (0, 0)
    assert status["samples"]["pooled"] == pool["pooled"]
    assert f'april_pool_samples_total{{what="continued"}} {pool["continued"]:.1f}' in metrics
    assert 'april_raced_mean_tokens{samples="trained"}' in metrics
    assert status["length_bias"]["trained_tokens"] < 40
    assert any("favours short" in r.message for r in caplog.records)
    assert (await buffer.recount()).faults == ()


async def test_on_redis_it_is_the_same(tmp_path, few_prompts):
    with EmbeddedRedis(tmp_path / "redis") as server:
        settings = racing(tmp_path / "run")
        buffer = await RedisBuffer.connect(server.url, limits=limits_of(settings))
        async with running_service(settings, buffer, lengths=length) as service:
            batches = await train_steps(service, await service.open_trainer(), 10)
        snapshot, recount = await buffer.snapshot(), await buffer.recount()
        await buffer.close()
    assert all(b.num_samples == 8 for b in batches)
    assert recount.faults == ()
    assert snapshot.pool.error == 0
    assert snapshot.pool.continued > 4


async def test_last_tokens_are_handed_in_and_nothing_is_left_waiting(tmp_path, few_prompts):
    settings = racing(tmp_path, checkpoint_interval_s=3600.0)  # nothing is written before a sample stops
    buffer = NotingBuffer()
    async with running_service(settings, buffer, lengths=length) as service:
        headers = await service.open_trainer()
        await train_steps(service, headers, 6)
        await service.client.post("/v1/pause")
        await service.until(lambda: service.parts.loop.num_running == 0)
        snapshot = await buffer.snapshot()
        assert snapshot.pool.continued > 0
        assert all(num_tokens for _, num_tokens in buffer.origin.values())
        waiting = {s.sample_id for s in await buffer.open_samples() if s.aside_s is not None}
        assert len(service.parts.loop._waiting) == len(waiting)


async def test_old_prefixes_start_anew_unless_epoch_lag_is_allowed(tmp_path, few_prompts):
    for allowed in (False, True):
        buffer = NotingBuffer()
        settings = racing(tmp_path / str(allowed), max_lag=1, allow_epoch_lag=allowed)
        async with running_service(settings, buffer, lengths=length) as service:
            batches = await train_steps(service, await service.open_trainer(), 12)
            snapshot = await buffer.snapshot()
        lags = [b.header.policy_version - v for b in batches for v in b.versions[b.loss_mask == 1]]
        if allowed:
            assert max(lags) > 1
            assert snapshot.pool.continued > 0
        else:
            assert max(lags) <= 1
            assert snapshot.pool.expired["stale"] > 0


async def test_a_service_that_starts_again_goes_on_with_the_pool(tmp_path, few_prompts):
    buffer = NotingBuffer()
    async with running_service(racing(tmp_path), buffer, lengths=length) as service:
        await train_steps(service, await service.open_trainer(), 3)
    before = await buffer.snapshot()
    assert before.samples[SampleState.RUNNING] == 0
    successor = MemoryBuffer(buffer.store)
    async with running_service(racing(tmp_path), successor, lengths=length) as service:
        batches = await train_steps(service, await service.open_trainer(3), 6, first=4)
        status = (await service.client.get("/v1/status")).json()
    assert all(b.num_samples == 8 for b in batches)
    assert status["pool"]["continued"] > before.pool.continued
    assert (status["ledger_error"], status["pool_error"]) == (0, 0)


async def test_the_ratio_inside_groups_changes_live(tmp_path, few_prompts):
    settings = racing(tmp_path, samples_ratio=1.0)
    async with running_service(settings, lengths=length) as service:
        headers = await service.open_trainer()
        await train_steps(service, headers, 2)
        assert (await service.client.get("/v1/status")).json()["pool"]["entered"] == 0
        view = (await service.client.patch("/v1/settings", json={"samples_ratio": 2.0})).json()
        assert view["samples_ratio"] == 2.0
        assert view["audit"][-1]["changes"] == {"samples_ratio": [1.0, 2.0]}
        await train_steps(service, headers, 4, first=3)
        assert (await service.client.get("/v1/status")).json()["pool"]["entered"] > 0
        refused = await service.client.patch("/v1/settings", json={"samples_ratio": 900.0})
        assert refused.status_code == 422
        assert "999" in refused.json()["detail"]
        assert (await service.client.get("/v1/settings")).json()["samples_ratio"] == 2.0


async def test_without_it_nothing_is_pooled(tmp_path, few_prompts):
    buffer = MemoryBuffer()
    async with running_service(racing(tmp_path, samples_ratio=1.0), buffer, lengths=length) as service:
        await train_steps(service, await service.open_trainer(), 4)
        await asyncio.sleep(0)
    snapshot = await buffer.snapshot()
    assert snapshot.pool.entered == 0
    assert not any(name.startswith("raced") for name in snapshot.counters)


def test_the_bias_is_the_trained_mean_against_at_least_the_started_mean():
    counters = {
        "raced_samples_trained": 4,
        "raced_tokens_trained": 40,
        "raced_samples_left": 2,
        "raced_tokens_left": 80,
    }
    bias = length_bias(counters)
    assert bias is not None
    assert (bias.trained_tokens, bias.started_tokens) == (10.0, 20.0)
    assert length_bias({}) is None
