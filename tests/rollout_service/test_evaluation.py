"""Evaluations beside rounds: pinned, with permits of their own, never cut, and over whatever happens."""

import asyncio
from dataclasses import replace

import pytest

from buffer.memory import MemoryBuffer
from buffer.memory_store import MemoryStore
from protocol.errors import EngineDeadError
from protocol.messages import PolicyState, StartEvaluation
from protocol.samples import Reward
from protocol.settings import RunSettings
from tests.support.service import running_service, service_settings

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def gate(monkeypatch):
    """Hold back the scores of evaluations until it is set."""
    event = asyncio.Event()

    def hold(service):
        score = service.scorer.score

        async def held(task):
            if task.sample_id.startswith("eval-"):
                await event.wait()
            return await score(task)

        monkeypatch.setattr(service.scorer, "score", held)
        return event

    return hold


def watch_requests(service, monkeypatch):
    """Requests of evaluations, as the engine gets them, and how many ran at once."""
    seen, running, most = [], set(), [0]
    generate = service.engines[0].generate

    async def watched(request):
        if request.request_id.startswith("eval-"):
            seen.append(request)
            running.add(request.request_id)
            most[0] = max(most[0], len(running))
        try:
            async for chunk in generate(request):
                yield chunk
        finally:
            running.discard(request.request_id)

    monkeypatch.setattr(service.engines[0], "generate", watched)
    return seen, most


async def finished(service, evaluation):
    await service.until(lambda: evaluation.state != "running")
    return evaluation


async def test_rounds_and_training_go_on_while_installs_wait(tmp_path, gate):
    async with running_service(service_settings(tmp_path)) as service:
        event = gate(service)
        headers = await service.open_trainer()
        evaluation = service.parts.evaluations.start(StartEvaluation())
        await service.until(lambda: service.parts.evaluations.running)
        await service.batch(1, headers)
        version = await service.publish(1, headers)
        await service.batch(2, headers)
        policy = await service.parts.policies.get(version)
        assert (evaluation.state, policy.state) == ("running", PolicyState.QUEUED)
        event.set()
        await finished(service, evaluation)
        await service.until(lambda: service.parts.policies.pending is None)
        policy = await service.parts.policies.get(version)
    assert (evaluation.state, evaluation.version, policy.state) == ("done", 0, PolicyState.ACTIVE)
    assert evaluation.num_done == evaluation.num_samples == 10


async def test_progress_is_seen_and_permits_are_its_own(tmp_path, monkeypatch):
    settings = service_settings(tmp_path, evaluation={"max_concurrency": 3})
    async with running_service(settings, lengths=lambda _: 30) as service:
        seen, most = watch_requests(service, monkeypatch)
        evaluation = service.parts.evaluations.start(StartEvaluation())
        assert (evaluation.state, evaluation.num_done, evaluation.num_samples) == ("running", 0, 10)
        await service.until(lambda: 0 < evaluation.num_done < 10)
        assert service.parts.evaluations.reserved_slots == 3
        view = (await service.client.get(f"/v1/evaluations/{evaluation.id}")).json()
        assert view["num_samples"] == 10
        assert view["scores"] is None
        await finished(service, evaluation)
        counts = (await service.parts.buffer.snapshot()).samples
        admitted = (await service.parts.buffer.snapshot()).ledger.admitted
    assert most[0] == 3
    assert len(seen) == 10
    assert sum(counts.values()) <= admitted * settings.rollout.n, "none of its samples is in the buffer"
    assert service.parts.evaluations.reserved_slots == 0


async def test_scores_of_several_samples(tmp_path):
    async with running_service(service_settings(tmp_path, evaluation={"n": 4})) as service:
        evaluation = await finished(service, service.parts.evaluations.start(StartEvaluation()))
        view = (await service.client.get(f"/v1/evaluations/{evaluation.id}")).json()
    scores = evaluation.scores
    assert scores is not None
    assert scores.num_samples == evaluation.num_samples == 40
    assert scores.pass_at[1] == pytest.approx(scores.mean) == pytest.approx(evaluation.mean_reward)
    assert scores.pass_at[1] < scores.pass_at[2] < scores.pass_at[4]
    assert evaluation.sources == {"test": scores}
    assert view["scores"]["pass_at"]["4"] == scores.pass_at[4]
    assert scores.max_tokens >= scores.p99_tokens >= scores.p50_tokens > 0


async def test_sampling_is_its_own(tmp_path, monkeypatch):
    own = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    async with running_service(service_settings(tmp_path, evaluation=own)) as service:
        seen, _ = watch_requests(service, monkeypatch)
        await finished(service, service.parts.evaluations.start(StartEvaluation(num_prompts=2)))
        await finished(service, service.parts.evaluations.start(StartEvaluation(num_prompts=2, temperature=0)))
        refused = await service.client.post("/v1/evaluations", json={"temperature": 0, "n": 2})
    sampled, greedy = seen[0].sampling, seen[2].sampling
    assert (sampled.temperature, sampled.top_p, sampled.top_k, sampled.max_tokens) == (0.6, 0.9, 20, 64)
    assert (greedy.temperature, greedy.top_p, greedy.top_k) == (0.0, 1.0, -1)
    assert refused.status_code == 400
    assert "2 greedy samples of a prompt would all be the same" in refused.json()["detail"]


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"n": 2, "do_sample": False}, "evaluation.n = 2 greedy samples of a prompt would all be the same"),
        ({"n": 2, "temperature": 0}, "set evaluation.n = 1, or"),
        ({"answer_pattern": "("}, "is not a regular expression"),
        ({"n": 5000}, "less than or equal to 1024"),
    ],
)
def test_settings_that_make_no_sense(own, words):
    with pytest.raises(ValueError, match=words):
        RunSettings(evaluation=own)


async def test_greedy_by_setting(tmp_path, monkeypatch):
    async with running_service(service_settings(tmp_path, evaluation={"do_sample": False})) as service:
        seen, _ = watch_requests(service, monkeypatch)
        evaluation = await finished(service, service.parts.evaluations.start(StartEvaluation(num_prompts=1)))
    assert seen[0].sampling.temperature == evaluation.temperature == 0


async def test_a_scorer_that_fails_sometimes_and_always(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        service.scorer.fails = lambda task: task.sample_id.startswith("eval-") and "v:3" in task.sample_id
        some = await finished(service, service.parts.evaluations.start(StartEvaluation()))
        service.scorer.fails = lambda task: task.sample_id.startswith("eval-")
        all_of_them = await finished(service, service.parts.evaluations.start(StartEvaluation()))
        await service.batch(1, await service.open_trainer())
    assert (some.state, some.num_done, some.num_failed) == ("done", 9, 1)
    assert some.scores.num_prompts == 9
    assert (all_of_them.state, all_of_them.num_failed) == ("failed", 10)
    assert "no sample could be scored" in all_of_them.error
    assert all_of_them.mean_reward is None


async def test_a_fault_ends_the_evaluation_and_not_the_service(tmp_path, monkeypatch):
    async with running_service(service_settings(tmp_path)) as service:
        score = service.scorer.score

        async def broken(task):
            if task.sample_id.startswith("eval-"):
                raise RuntimeError("a bug")
            return await score(task)

        monkeypatch.setattr(service.scorer, "score", broken)
        evaluation = await finished(service, service.parts.evaluations.start(StartEvaluation()))
        await service.batch(1, await service.open_trainer())
        assert not service.parts.evaluations.running
    assert (evaluation.state, evaluation.error) == ("failed", "RuntimeError: a bug")


async def test_one_that_takes_too_long_lets_go(tmp_path, gate):
    async with running_service(service_settings(tmp_path, evaluation={"hold_timeout_s": 0.2})) as service:
        gate(service)
        headers = await service.open_trainer()
        evaluation = await finished(service, service.parts.evaluations.start(StartEvaluation()))
        await service.batch(1, headers)
        version = await service.publish(1, headers)
        await service.until(lambda: service.parts.policies.pending is None)
        assert (await service.parts.policies.get(version)).state is PolicyState.ACTIVE
    assert (evaluation.state, evaluation.error) == ("failed", "not finished within 0.2 s")
    assert evaluation.scores is None, "those that ended early are the short ones: they say nothing of all"


async def test_a_request_that_fails_is_made_again(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        evaluation = service.parts.evaluations.start(StartEvaluation())
        service.engines[0].faults.fail_requests[f"eval-{evaluation.id}-v:1.0"] = 1
        service.engines[0].faults.fail_requests[f"eval-{evaluation.id}-v:2.0"] = 99
        await finished(service, evaluation)
    assert (evaluation.state, evaluation.num_done, evaluation.num_failed) == ("done", 9, 1)


async def test_tokens_of_another_version_are_not_counted(tmp_path, monkeypatch):
    async with running_service(service_settings(tmp_path)) as service:
        generate = service.engines[0].generate

        async def relabelled(request):
            async for chunk in generate(request):
                yield replace(chunk, version=5) if request.request_id.startswith("eval-") else chunk

        monkeypatch.setattr(service.engines[0], "generate", relabelled)
        evaluation = await finished(service, service.parts.evaluations.start(StartEvaluation()))
    assert (evaluation.state, evaluation.num_failed) == ("failed", 10)


async def test_without_an_engine_the_whole_evaluation_fails(tmp_path, monkeypatch):
    async with running_service(service_settings(tmp_path)) as service:
        generate = service.engines[0].generate

        async def dead(request):
            if request.request_id.startswith("eval-"):
                raise EngineDeadError("engine-0 has died")
            async for chunk in generate(request):
                yield chunk

        monkeypatch.setattr(service.engines[0], "generate", dead)
        evaluation = await finished(service, service.parts.evaluations.start(StartEvaluation()))
    assert (evaluation.state, evaluation.error) == ("failed", "engine-0 has died")


async def test_a_service_that_starts_again_knows_nothing_of_it(tmp_path, gate):
    store, settings = MemoryStore(), service_settings(tmp_path)
    async with running_service(settings, MemoryBuffer(store)) as service:
        gate(service)
        lost = service.parts.evaluations.start(StartEvaluation())
        await service.until(lambda: service.parts.evaluations.running)
    assert (lost.state, lost.error) == ("failed", "the service stops; ask again when it is up")
    async with running_service(settings, MemoryBuffer(store)) as service:
        first = service.parts.evaluations.start(StartEvaluation())
        answer = await service.client.get(f"/v1/evaluations/{lost.id}")
        await finished(service, first)
    assert answer.status_code == 404
    assert first.id != lost.id


async def test_majorities_by_the_answers_of_the_responses(tmp_path, monkeypatch):
    settings = service_settings(tmp_path, evaluation={"n": 3}, reward={"name": "gsm8k"})
    async with running_service(settings) as service:

        async def score(task):
            """Two of three samples give 7, which is right for even prompts only."""
            return Reward(float((int(task.ground_truth) % 2 == 0) == task.response.endswith("7")))

        def decode(tokens):
            # The engine's tokens differ from sample to sample; their count is what a sample is known by here.
            return f"#### {7 if len(tokens) != 5 else 8}"

        lengths = {"0": 3, "1": 4, "2": 5}
        monkeypatch.setattr(service.engines[0], "_lengths", lambda sample_id: lengths.get(sample_id[-1], 6))
        monkeypatch.setattr(service.scorer, "score", score)
        object.__setattr__(service.parts.sample_parts, "decode", decode)
        evaluation = await finished(service, service.parts.evaluations.start(StartEvaluation()))
    scores = evaluation.scores
    assert scores is not None
    assert scores.majority == 0.5
    assert scores.mean == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert scores.pass_at == pytest.approx({1: 0.5, 2: (1 + 2 / 3) / 2, 3: 1.0})
