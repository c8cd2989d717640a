"""Redis stopped, full, and slow for a while: the service waits in bounded memory, says so, and goes on alone."""

import time
from collections.abc import Callable

import httpx
import pytest
import redis

from tests.support.children import resident_bytes
from tests.support.cluster import System, open_system
from tests.support.history import judge
from tests.support.journal import read_history
from tests.support.scripted_trainer import FENCED_EXIT
from tests.support.tcp_proxy import Mode

pytestmark = pytest.mark.timeout(400)

# What a service may grow by while it can store nothing: the tokens of what runs are some hundred KiB, the rest is what
# clients, tasks and the allocator take for calls that wait.
MAX_GROWTH_BYTES = 48 << 20
LONG = ("--data.max_response_length=2000", "--engine.simulated.median_tokens=400", "--buffer.sample_lease_s=30")


def memory_over(system: System, seconds: float) -> int:
    """The most memory that the service had in that time."""
    assert system.service is not None
    most, deadline = 0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert system.service.alive, system.service.tail()
        most = max(most, resident_bytes(system.service.popen.pid))
        time.sleep(0.1)
    return most


def readiness(system: System) -> str:
    """What `/readyz` answers; it needs no Redis."""
    return httpx.get(f"{system.settings.trainer.service_url}/readyz", timeout=30.0).text


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def trains_on(system: System, num_steps: int) -> None:
    """Some more steps become durable; then everything ends in order and every promise was kept."""
    assert system.service is not None
    (trainer,) = system.trainers
    goal = system.until(lambda s: True, system.service, trainer).durable_step + num_steps
    system.until(lambda s: s.durable_step >= goal, system.service, trainer)
    for process in (trainer, system.service):
        assert process.end() in (0, FENCED_EXIT), process.tail()
    system.record_final()
    assert [v for v in judge(*read_history(system.history_folder)) if v.violations] == []


def start(system: System) -> int:
    """Service and trainer, until some steps are trained; the service's memory then."""
    service = system.start_service()
    trainer = system.start_trainer()
    system.until(lambda s: s.trained_step >= 3, service, trainer)
    return resident_bytes(service.popen.pid)


@pytest.mark.slow
def test_a_redis_that_is_stopped_for_a_minute_is_waited_for_in_bounded_memory(tmp_path, tiny_model_dir):
    with open_system(tmp_path, tiny_model_dir, overrides=LONG) as system:
        before = start(system)
        assert system.redis is not None
        system.redis.stop()
        most = memory_over(system, 60.0)
        assert "Redis" in readiness(system)
        system.redis.go_on()
        assert most - before < MAX_GROWTH_BYTES, f"it grew from {before} to {most} bytes"
        trains_on(system, 4)


@pytest.mark.slow
def test_a_full_redis_is_drained_and_goes_on_when_it_has_room(tmp_path, tiny_model_dir):
    with open_system(tmp_path, tiny_model_dir, overrides=LONG) as system:
        before = start(system)
        with redis.Redis(port=system.redis_port) as client:
            client.config_set("maxmemory", client.info("memory")["used_memory"])
            until(lambda: client.info("errorstats").get("errorstat_OOM", {}).get("count", 0) > 0)
            most = memory_over(system, 3.0)
            durable = system.until(lambda s: True).durable_step
            client.config_set("maxmemory", 0)
        assert most - before < MAX_GROWTH_BYTES
        assert system.until(lambda s: True).durable_step >= durable
        trains_on(system, 4)


@pytest.mark.slow
def test_a_redis_that_answers_after_two_seconds_is_worked_with(tmp_path, tiny_model_dir):
    with open_system(tmp_path, tiny_model_dir, overrides=LONG) as system:
        before = start(system)
        system.proxy.set(Mode.DELAY, 1.0)  # each way
        with httpx.Client(base_url=system.settings.trainer.service_url, timeout=60.0) as patient:
            trained = patient.get("/v1/status").json()["trained_step"]
            most = memory_over(system, 20.0)
            while patient.get("/v1/status").json()["trained_step"] <= trained:
                most = max(most, memory_over(system, 1.0))
        system.proxy.set(Mode.PASS)
        assert most - before < MAX_GROWTH_BYTES
        trains_on(system, 4)
