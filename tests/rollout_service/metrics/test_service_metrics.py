"""`/metrics` of a whole service: what it says is what happened, in every state of the service."""

import asyncio

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families

from protocol.errors import UnavailableError
from protocol.messages import TRAINER_EPOCH_HEADER
from protocol.metric_spec import MetricKind
from protocol.states import FailReason
from rollout_service.app.host import Host
from rollout_service.metrics.catalogue import SERVICE_CATALOGUE
from rollout_service.metrics.delivery import LAG_LABELS, MAX_NAMES
from rollout_service.rewards.interface import ScoringError
from tests.support.service import running_service, service_settings

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


def values_of(text):
    """(series, labels) -> value."""
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


async def scraped(service):
    response = await service.client.get("/metrics")
    assert response.status_code == 200, response.text
    return values_of(response.text)


async def train(service, headers, steps):
    for step in steps:
        batch = await service.batch(step, headers)
        await service.publish(step, headers)
        yield step, batch


async def test_every_metric_of_the_catalogue_is_exposed_and_no_other(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        async for _ in train(service, headers, range(1, 4)):
            pass
        text = (await service.client.get("/metrics")).text
    described = {line.split()[2]: line.split()[3] for line in text.splitlines() if line.startswith("# TYPE")}
    ours = {name: kind for name, kind in described.items() if name.startswith("april_")}
    assert ours == {spec.name: spec.kind.value for spec in SERVICE_CATALOGUE}
    helps = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")}
    assert set(ours) <= helps
    assert {"process_cpu_seconds_total", "process_resident_memory_bytes", "python_info"} <= set(described)


async def test_it_agrees_with_the_status_and_the_batches(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        tokens_by_lag = dict.fromkeys(LAG_LABELS, 0)
        async for step, batch in train(service, headers, range(1, 7)):
            held = batch.header.policy_version
            for version in batch.versions[batch.loss_mask.astype(bool)].tolist():
                tokens_by_lag[str(held - version)] += 1
            body = {"step": step, "metrics": {"timing_s/wait": 0.25, "mismatch/lag0_mean": 0.001 * step}}
            assert (await service.client.post("/v1/trainers/metrics", json=body, headers=headers)).status_code == 204
        await service.client.post("/v1/pause")
        await service.until(lambda: service.parts.loop.safe_to_stop)
        status = (await service.client.get("/v1/status")).json()
        found = await scraped(service)
    assert found["april_ledger_error", ()] == 0
    for state, count in status["ledger"].items():
        assert found["april_groups", (("state", state),)] == count
    assert found["april_samples_scored_total", ()] == status["counters"]["samples_scored"]
    assert found["april_resumes_total", ()] == status["counters"]["resumes"]
    assert found["april_trained_step", ()] == 6
    assert found["april_trainer_idle_seconds_total", ()] == 1.5
    assert found["april_engine_drift", ()] == pytest.approx(0.006)
    assert found["april_deliveries_total", (("kind", "first"),)] == 6
    assert found["april_delivery_wait_seconds_count", (("answer", "batch"),)] == 6
    assert found["april_policy_installs_total", (("result", "active"),)] == found["april_policy_active_version", ()]
    for lag, count in tokens_by_lag.items():
        assert found["april_batch_tokens_total", (("lag", lag),)] == count
    assert sum(tokens_by_lag.values()) > 0


async def test_what_is_observed_adds_up_to_what_the_buffer_counted(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        async for _ in train(service, headers, range(1, 7)):
            pass
        await service.client.post("/v1/pause")
        await service.until(lambda: service.parts.loop.safe_to_stop)
        found = await scraped(service)
        buffer = service.parts.buffer
        groups = await buffer.groups([g.group_id for g in await buffer.open_groups()])
    finished = sum(found["april_sample_tokens_count", (("finish", finish),)] for finish in ("stop", "length"))
    assert finished == found["april_samples_scored_total", ()]
    assert found["april_reward_seconds_count", (("scorer", "auto"),)] == finished
    tokens = sum(found["april_sample_tokens_sum", (("finish", finish),)] for finish in ("stop", "length"))
    unfinished = sum(s.num_tokens for g in groups for s in g.samples if s.finish_reason is None)
    assert tokens + unfinished == found["april_tokens_appended_total", ()]
    assert found["april_round_seconds_count", ()] >= 6
    assert found["april_round_stragglers_count", ()] == found["april_round_seconds_count", ()]
    assert found["april_group_seconds_count", ()] == sum(
        found["april_groups", (("state", state),)] for state in ("ready", "leased", "consumed")
    )
    assert 0 <= found["april_idle_slot_seconds_total", ()] <= found["april_slot_seconds_total", ()]


async def test_open_metrics_if_the_scraper_asks_for_it(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        await service.batch(1, headers)
        response = await service.client.get("/metrics", headers={"Accept": OPEN_METRICS})
        classic = await service.client.get("/metrics", headers={"Accept": "text/plain"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")
    found = {family.name: family.type for family in open_families(response.text)}
    for spec in SERVICE_CATALOGUE:
        assert found[spec.name.removesuffix("_total")] == spec.kind.value
    assert classic.headers["content-type"].startswith("text/plain")


async def test_its_size_does_not_depend_on_how_long_the_run_is(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        first, last_step = None, None
        async for step, _ in train(service, headers, range(1, 1000)):
            body = {"step": step, "metrics": {f"reward_parts/{n}": 1.0 for n in range(50)}}
            await service.client.post("/v1/trainers/metrics", json=body, headers=headers)
            await service.client.post(f"/v1/batches/{step}/ack", headers=headers)
            if first is None and step >= 5:
                found = await scraped(service)
                if ("april_parked_bytes", ()) in found:  # after the first moment, a second after the start
                    first, last_step = set(found), step + 20
            elif step == last_step:
                break
        last = set(await scraped(service))
    assert last_step is not None
    assert first == last


async def test_a_trainer_that_names_metrics_after_prompts_does_not_fill_prometheus(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        for step in range(1, 4):
            body = {"step": step, "metrics": {f"prompt/{step}-{n}": 1.0 for n in range(MAX_NAMES)}}
            await service.client.post("/v1/trainers/metrics", json=body, headers=headers)
        found = await scraped(service)
    assert sum(name == "april_trainer_metric" for name, _ in found) == MAX_NAMES


async def test_it_answers_before_the_parts_have_started_and_after_they_stop(tmp_path):
    settings = service_settings(tmp_path)
    starting = values_of((await Host(settings).metrics.scrape(""))[0].decode())
    assert starting["april_up", ()] == 1
    assert starting["april_ready", ()] == 0
    assert ("april_ledger_error", ()) not in starting
    async with running_service(settings) as service:
        assert (await scraped(service))["april_ready", ()] == 1
        service.host.stopping()
        stopping = await scraped(service)
    assert stopping["april_ready", ()] == 0
    assert stopping["april_ledger_error", ()] == 0


async def test_it_answers_with_the_last_known_values_while_redis_is_away(tmp_path, monkeypatch):
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        async for _ in train(service, headers, range(1, 3)):
            pass
        before = await scraped(service)

        async def away():
            raise UnavailableError("Redis doesn't answer")

        with monkeypatch.context() as patched:
            patched.setattr(service.parts.buffer, "snapshot", away)
            first = await scraped(service)
            later = await scraped(service)
        back = await scraped(service)
    assert before["april_redis_waiting_seconds", ()] == 0
    assert first["april_ready", ()] == 0
    assert later["april_redis_waiting_seconds", ()] > 0
    assert later["april_trained_step", ()] == before["april_trained_step", ()]
    assert later["april_status_age_seconds", ()] > first["april_status_age_seconds", ()]
    assert later["april_redis_outages_total", ()] == 1
    assert (back["april_ready", ()], back["april_redis_waiting_seconds", ()]) == (1, 0)
    assert back["april_redis_outages_total", ()] == 1


async def test_a_redis_that_hangs_does_not_hang_the_scrape(tmp_path, monkeypatch):
    monkeypatch.setattr("rollout_service.metrics.status.SCRAPE_PATIENCE_S", 0.01)
    async with running_service(service_settings(tmp_path)) as service:
        with monkeypatch.context() as patched:
            patched.setattr(service.parts.buffer, "snapshot", asyncio.Event().wait)
            assert (await scraped(service))["april_ready", ()] == 0


async def test_a_scrape_that_waits_does_not_spoil_another(tmp_path, monkeypatch):
    async with running_service(service_settings(tmp_path)) as service:
        assert (await scraped(service))["april_ready", ()] == 1
        answer = service.parts.buffer.snapshot
        waits, go_on = asyncio.Event(), asyncio.Event()

        async def slow():
            waits.set()
            await go_on.wait()
            return await answer()

        with monkeypatch.context() as patched:
            patched.setattr(service.parts.buffer, "snapshot", slow)
            first = asyncio.create_task(scraped(service))
            await waits.wait()
        second = await scraped(service)
        go_on.set()
        assert (await first)["april_ready", ()] == 1
    assert second["april_ready", ()] == 1


async def test_failed_scores_are_counted_by_scorer_and_reason(tmp_path):
    settings = service_settings(tmp_path, reward={"name": "math_verify"}, rollout={"min_group_samples": 1})
    async with running_service(settings) as service:
        service.scorer.fails = lambda task: int(task.sample_id.rpartition(".")[2]) == 0
        headers = await service.open_trainer()
        await service.batch(1, headers)
        await service.client.post("/v1/pause")
        await service.until(lambda: service.parts.loop.safe_to_stop)
        found = await scraped(service)
    failed = found["april_reward_failures_total", (("reason", "reward_error"), ("scorer", "math_verify"))]
    assert failed > 0
    assert failed == found["april_sample_failures_total", (("reason", "reward_error"),)]
    assert found["april_reward_failures_total", (("reason", "reward_timeout"), ("scorer", "math_verify"))] == 0


async def test_a_scorer_that_times_out_is_seen_while_it_runs(tmp_path):
    settings = service_settings(tmp_path, rollout={"min_group_samples": 1})
    async with running_service(settings) as service:
        hangs = asyncio.Event()

        async def slow(task):
            await hangs.wait()
            raise ScoringError(FailReason.REWARD_TIMEOUT, "it took too long")

        service.parts.sample_parts.scorer.inner.score = slow
        await service.until(lambda: service.parts.sample_parts.scorer.num_waiting > 3)
        during = await scraped(service)
        hangs.set()
        await service.until(lambda: service.parts.sample_parts.scorer.num_waiting == 0)
        after = await scraped(service)
    assert during["april_reward_waiting", ()] > 3
    assert after["april_reward_failures_total", (("reason", "reward_timeout"), ("scorer", "auto"))] > 3


async def test_a_failed_install_and_a_replay_are_counted(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        first = await service.client.post("/v1/batches", json={"step": 1, "wait_s": 30}, headers=headers)
        again = await service.client.post("/v1/batches", json={"step": 1, "wait_s": 30}, headers=headers)
        assert first.content == again.content
        service.engines[0].faults.fail_install = "told to"
        await service.publish(1, headers)
        await service.until(lambda: service.parts.policies.pending is None)
        found = await scraped(service)
    assert found["april_deliveries_total", (("kind", "first"),)] == 1
    assert found["april_deliveries_total", (("kind", "replay"),)] == 1
    assert found["april_policy_installs_total", (("result", "failed"),)] == 1
    assert found["april_policy_install_seconds_count", ()] == 0


async def test_a_long_poll_without_a_batch_is_told_apart(tmp_path):
    async with running_service(service_settings(tmp_path)) as service:
        headers = await service.open_trainer()
        await service.client.post("/v1/pause")
        await service.until(lambda: service.parts.loop.safe_to_stop)
        step = {TRAINER_EPOCH_HEADER: headers[TRAINER_EPOCH_HEADER]}
        answer = await service.client.post("/v1/batches", json={"step": 1, "wait_s": 0}, headers=step)
        found = await scraped(service)
    name = "none" if answer.status_code == 204 else "batch"
    assert found["april_delivery_wait_seconds_count", (("answer", name),)] == 1


async def test_observing_can_be_switched_off(tmp_path):
    async with running_service(service_settings(tmp_path, service={"metrics": False})) as service:
        headers = await service.open_trainer()
        async for _ in train(service, headers, range(1, 4)):
            pass
        found = await scraped(service)
    assert found["april_samples_scored_total", ()] > 0
    assert ("april_parked_bytes", ()) not in found, "a 0 that nobody counted would be a lie"
    observed = [spec.name for spec in SERVICE_CATALOGUE if spec.kind is MetricKind.HISTOGRAM]
    for name in ("april_sample_seconds", "april_round_seconds", "april_policy_install_seconds"):
        assert name in observed
        assert found[f"{name}_count", ()] == 0


async def test_the_token_is_wanted(tmp_path):
    async with running_service(service_settings(tmp_path, service={"token": "s3cret"})) as service:
        service.client.headers.pop("authorization")
        assert (await service.client.get("/metrics")).status_code == 401
