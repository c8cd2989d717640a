"""The service through its HTTP API, on the simulated engine and the in-memory buffer."""

import asyncio
import hashlib

import pytest

from buffer.memory import MemoryBuffer
from buffer.memory_store import MemoryStore
from protocol.messages import BATCH_SHA256_HEADER, TRAINER_EPOCH_HEADER
from protocol.states import SampleState
from tests.support.provenance import check_provenance, train_steps
from tests.support.service import running_service, service_settings

pytestmark = pytest.mark.timeout(120)


async def test_steps_are_delivered_with_exact_provenance_over_many_versions(tmp_path):
    settings = service_settings(tmp_path, rollout={"max_lag": 3})
    lengths = {}

    def length(sample_id):
        digest = hashlib.blake2b(sample_id.encode(), digest_size=1).digest()[0]
        return lengths.setdefault(sample_id, 3 if digest % 4 else 55)

    async with running_service(settings, lengths=length) as service:
        headers = await service.open_trainer()
        batches = await train_steps(service, headers, 12)
        status = (await service.client.get("/v1/status")).json()
    samples = [s for b in batches for s in b.header.samples]
    assert any(len(s.segments) > 1 for s in samples), "nothing was resumed under another version"
    for batch in batches:
        check_provenance(batch)
        versions = batch.versions[batch.loss_mask == 1]
        assert (batch.header.policy_version - versions).max() <= 3
    ids = [g.group_id for b in batches for g in b.header.groups]
    assert len(ids) == len(set(ids)) == 48
    assert status["ledger_error"] == 0
    assert status["counters"]["samples_resumed"] > 0


async def test_the_same_step_gives_the_same_bytes_to_a_new_epoch(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        first = await service.client.post("/v1/batches", json={"step": 1, "wait_s": 30}, headers=headers)
        await service.publish(1, headers)
        newer = await service.open_trainer()
        again = await service.client.post("/v1/batches", json={"step": 1, "wait_s": 0}, headers=newer)
        old = await service.client.post("/v1/batches", json={"step": 1, "wait_s": 0}, headers=headers)
    assert first.content == again.content
    assert first.headers[BATCH_SHA256_HEADER] == hashlib.sha256(again.content).hexdigest()
    assert old.status_code == 409
    assert old.headers["content-type"] == "application/problem+json"
    assert "epoch" in old.json()["detail"]


async def test_a_waiting_superseded_trainer_is_told(tmp_path):
    settings = service_settings(tmp_path)
    async with running_service(settings) as service:
        headers = await service.open_trainer()
        await service.client.post("/v1/pause")
        waiting = asyncio.create_task(
            service.client.post("/v1/batches", json={"step": 1, "wait_s": 60}, headers=headers)
        )
        await asyncio.sleep(0)
        await service.open_trainer()
        response = await waiting
    assert response.status_code in (200, 409)


async def test_ack_is_idempotent_and_a_step_in_the_past_is_refused(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        await train_steps(service, headers, 2)
        spool = service.parts.settings.spool_dir
        assert len(list(spool.glob("*.safetensors"))) == 2
        first = await service.client.post("/v1/batches/2/ack", headers=headers)
        again = await service.client.post("/v1/batches/2/ack", headers=headers)
        past = await service.client.post("/v1/batches", json={"step": 1, "wait_s": 0}, headers=headers)
        assert first.json() == {"durable_step": 2, "num_groups": 8}
        assert again.json() == {"durable_step": 2, "num_groups": 0}
        assert past.status_code == 409
        assert not list(spool.glob("*.safetensors"))


async def test_a_failed_install_leaves_the_old_version_active_and_says_where(tmp_path):
    settings = service_settings(tmp_path, engine={"num_replicas": 2})
    async with running_service(settings) as service:
        headers = await service.open_trainer()
        await train_steps(service, headers, 1)
        await service.until(lambda: service.parts.policies.pending is None)
        service.engines[1].faults.fail_install = "out of memory"
        await service.batch(2, headers)
        version = await service.publish(2, headers)
        await service.until(lambda: service.parts.policies.pending is None)
        policy = (await service.client.get(f"/v1/policies/{version}")).json()
        status = (await service.client.get("/v1/status")).json()
        assert policy["state"] == "failed"
        assert "engine-1" in policy["error"]
        assert "out of memory" in policy["error"]
        assert status["active_version"] == 1
        assert [e["version"] for e in status["engines"]] == [1, 1]
        batches = await train_steps(service, headers, 2, first=3)
        for batch in batches:
            check_provenance(batch)


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("../../outside", "not under the weights root"),
        ("missing", "not a folder"),
        (".", "not under the weights root"),
        ("a\0b", "not a folder"),
    ],
)
async def test_weights_outside_the_root_are_refused(tmp_path, path, word):
    async with running_service(service_settings(tmp_path / "run")) as service:
        (tmp_path / "outside").mkdir()
        service.parts.settings.weights_root.mkdir(parents=True, exist_ok=True)
        headers = await service.open_trainer()
        await service.batch(1, headers)
        response = await service.client.post("/v1/policies", json={"step": 1, "path": path}, headers=headers)
    assert response.status_code == 422
    assert word in response.json()["detail"]


async def test_weights_with_a_wrong_checksum_are_refused(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        await service.batch(1, headers)
        path = service.write_weights(1)
        weights = service.parts.settings.weights_root / path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x07")
        response = await service.client.post("/v1/policies", json={"step": 1, "path": path}, headers=headers)
    assert response.status_code == 422
    assert "another checksum" in response.json()["detail"]


async def test_scoring_failures_leave_the_group_or_drop_it(tmp_path):
    settings = service_settings(tmp_path, rollout={"n": 3, "min_group_samples": 2})
    async with running_service(settings) as service:
        service.scorer.fails = lambda task: (
            task.sample_id.endswith(".000")
            or (task.sample_id.endswith(".001") and int(task.prompt.split()[1]) % 3 == 0)
        )
        headers = await service.open_trainer()
        batches = await train_steps(service, headers, 3)
        status = (await service.client.get("/v1/status")).json()
    assert all(b.num_samples == 8 for b in batches)
    assert all(len(g.failed) == 1 for b in batches for g in b.header.groups)
    assert batches[0].header.groups[0].failed[0].reason == "reward_error"
    assert status["ledger"]["dropped"] > 0
    assert status["counters"]["dropped:too_few_samples"] == status["ledger"]["dropped"]
    assert status["ledger_error"] == 0


async def test_an_engine_error_is_tried_again_from_the_last_token_and_then_recorded(tmp_path):
    async with running_service(service_settings(tmp_path, rollout={"min_group_samples": 1})) as service:
        service.engines[0].faults.fail_requests["g000000001.000"] = 1
        service.engines[0].faults.fail_requests["g000000002.000"] = 99
        headers = await service.open_trainer()
        batches = await train_steps(service, headers, 3)
    for batch in batches:
        check_provenance(batch)
    failed = {f.sample_id: f for b in batches for g in b.header.groups for f in g.failed}
    assert set(failed) <= {"g000000002.000"}


async def test_pause_parks_everything_and_resume_goes_on(tmp_path):
    async with running_service(service_settings(tmp_path), lengths=lambda _: 60) as service:
        headers = await service.open_trainer()
        await service.until(lambda: service.engines[0].stats().tokens_generated > 0)
        await service.client.post("/v1/pause")
        await service.until(lambda: service.parts.loop.safe_to_stop and not service.parts.loop.num_running)
        snapshot = await service.parts.buffer.snapshot()
        assert snapshot.samples[SampleState.RUNNING] == 0
        assert (await service.client.get("/readyz")).json()["waits"] == ["the operator: generation is paused"]
        await service.client.post("/v1/resume")
        check_provenance(await service.batch(1, headers))


async def test_drain_says_when_it_is_safe_to_stop_and_a_new_service_goes_on(tmp_path):
    store = MemoryStore()
    settings = service_settings(tmp_path)
    async with running_service(settings, MemoryBuffer(store), lengths=lambda _: 60) as service:
        await service.until(lambda: service.engines[0].stats().tokens_generated > 100)
        await service.client.post("/v1/drain")
        await service.until(lambda: service.parts.loop.safe_to_stop)
        assert (await service.client.post("/v1/drain")).json()["safe_to_stop"]
        assert (await service.client.post("/v1/resume")).status_code == 409
        before = await service.parts.buffer.snapshot()
    async with running_service(settings, MemoryBuffer(store), lengths=lambda _: 60) as service:
        headers = await service.open_trainer()
        batch = await service.batch(1, headers)
        after = await service.parts.buffer.snapshot()
    check_provenance(batch)
    assert after.ledger.admitted == before.ledger.admitted
    assert any(s.num_resumes for s in batch.header.samples)


async def test_a_restarted_service_serves_the_version_that_was_active(tmp_path):
    store = MemoryStore()
    settings = service_settings(tmp_path)
    async with running_service(settings, MemoryBuffer(store)) as service:
        headers = await service.open_trainer()
        await train_steps(service, headers, 2)
        await service.until(lambda: service.parts.policies.pending is None)
    async with running_service(settings, MemoryBuffer(store)) as service:
        assert (await service.client.get("/v1/status")).json()["active_version"] == 2
        assert [e.stats().version for e in service.engines] == [2]


async def test_live_settings_change_the_next_decision_and_are_audited(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        changed = await service.client.patch("/v1/settings", json={"ratio": 1.5})
        refused = await service.client.patch("/v1/settings", json={"ratio": 9})
        unknown = await service.client.patch("/v1/settings", json={"ratoi": 2})
        assert changed.json()["audit"][0]["changes"] == {"ratio": [2.0, 1.5]}
        assert service.parts.control.ratio == 1.5
        assert refused.status_code == 422
        assert "max_lag" in refused.json()["detail"]
        assert unknown.status_code == 422


async def test_an_evaluation_is_pinned_and_not_cut_by_rounds(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        started = (await service.client.post("/v1/evaluations", json={"n": 2})).json()
        await train_steps(service, headers, 3)
        await service.until(lambda: not service.parts.evaluations.running)
        found = (await service.client.get(f"/v1/evaluations/{started['id']}")).json()
        admitted = (await service.parts.buffer.snapshot()).ledger.admitted
    assert found["state"] == "done"
    assert found["num_done"] == 20
    assert found["version"] == started["version"]
    assert 0 <= found["mean_reward"] <= 1
    assert admitted * 2 >= len([s for s in service.scorer.scored if not s.startswith("eval-")])


async def test_group_view_shows_segments_versions_and_rewards(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        batch = await service.batch(1, await service.open_trainer())
        header = batch.header.groups[0]
        view = (await service.client.get(f"/v1/groups/{header.group_id}")).json()
        missing = await service.client.get("/v1/groups/g999999")
    assert view["state"] == "leased"
    assert view["prompt"].startswith("prompt ")
    first = view["samples"][0]
    begin = batch.prompt_lengths[0]
    assert first["sample_id"] == batch.header.samples[0].sample_id
    assert [t for s in first["segments"] for t in s["tokens"]] == batch.tokens[begin : batch.sample_offsets[1]].tolist()
    assert first["reward"] == batch.rewards[0]
    assert missing.status_code == 404


async def test_metrics_name_the_ledger_and_the_trainer(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        body = {"step": 1, "metrics": {"loss/policy": 0.5}}
        assert (await service.client.post("/v1/trainers/metrics", json=body, headers=headers)).status_code == 204
        text = (await service.client.get("/metrics")).text
    assert "april_ledger_error 0.0" in text
    assert 'april_trainer_metric{name="loss/policy"} 0.5' in text


async def test_token_is_required_everywhere_but_on_probes(tmp_path):
    settings = service_settings(tmp_path, service={"token": "s3cret"})
    async with running_service(settings) as service:
        good = dict(service.client.headers)
        service.client.headers.pop("authorization")
        for path in ("/v1/status", "/metrics", "/v1/settings", "/v1/groups/g1"):
            response = await service.client.get(path)
            assert response.status_code == 401, path
            assert "Bearer" in response.json()["detail"]
        wrong = await service.client.get("/v1/status", headers={"Authorization": "Bearer s3cre7"})
        assert wrong.status_code == 401
        assert (await service.client.get("/healthz")).status_code == 200
        assert (await service.client.get("/readyz")).status_code == 200
        assert (await service.client.get("/v1/status", headers=good)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "kwargs", "status"),
    [
        ("POST", "/v1/batches", {"content": b"\xff\x00garbage"}, 422),
        ("POST", "/v1/batches", {"json": {"step": 1}}, 422),
        ("POST", "/v1/batches", {"json": {"step": 0}, "headers": {TRAINER_EPOCH_HEADER: "1"}}, 422),
        ("POST", "/v1/batches", {"json": {"step": 7}, "headers": {TRAINER_EPOCH_HEADER: "1"}}, 409),
        ("POST", "/v1/batches", {"json": {"step": 1}, "headers": {TRAINER_EPOCH_HEADER: "77"}}, 409),
        ("POST", "/v1/trainers", {"json": {"durable_step": -1}}, 422),
        ("POST", "/v1/trainers", {"json": {"durable_step": 0, "extra": 1}}, 422),
        ("GET", "/v1/nowhere", {}, 404),
        ("DELETE", "/v1/status", {}, 405),
        ("GET", "/v1/policies/99", {}, 404),
        ("POST", "/v1/pause", {"content": b"x" * 9_000_000}, 413),
    ],
)
async def test_bad_requests_get_problem_documents(tmp_path, method, path, kwargs, status):
    async with running_service(service_settings(tmp_path)) as service:
        await service.open_trainer()
        response = await service.client.request(method, path, **kwargs)
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/problem+json"
        assert response.json()["detail"]
        assert (await service.client.get("/v1/status")).json()["ledger_error"] == 0
