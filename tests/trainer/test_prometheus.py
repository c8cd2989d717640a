"""The trainer's own `/metrics`."""

import socket
import threading

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families

from protocol.errors import SettingsError
from protocol.settings import RunSettings
from tests.trainer.fake_service import FakeService, serving
from tests.trainer.trainings import batch_of, with_trainer
from trainer.main import train
from trainer.metric_catalogue import PHASES, STEP_METRICS, TRAINER_CATALOGUE, series_name
from trainer.prometheus import MAX_NAMES, NoExporter, PrometheusExporter, open_exporter
from trainer.summary import Totals

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def scraped(port: int, accept: str = "text/plain") -> str:
    response = httpx.get(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    assert response.status_code == 200
    return response.text


def values_of(text: str) -> dict:
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def exporter(port):
    made = PrometheusExporter("test", "127.0.0.1", port)
    yield made
    made.close()


def test_every_metric_of_the_catalogue_is_exposed_and_no_other(exporter, port) -> None:
    text = scraped(port)
    kinds = {line.split()[2]: line.split()[3] for line in text.splitlines() if line.startswith("# TYPE april_")}
    assert kinds == {spec.name: spec.kind.value for spec in TRAINER_CATALOGUE}


def test_it_tells_what_it_was_told(exporter, port) -> None:
    exporter.planned(40, 10, Totals(nan_skips=2, publish_failures=1))
    timings = {f"timing_s/{phase}": 0.5 for phase in PHASES if phase != "save"}
    metrics = {"reward/mean": 0.25, "actor/lr": 1e-4, "tokens/trained": 100, "samples/trained": 8, "timing_s/step": 2.0}
    exporter.trained(11, metrics | timings, Totals(nan_skips=2, publish_failures=1))
    exporter.trained(12, {"reward/mean": 0.5, "reward_parts/format": 1.0}, Totals(nan_skips=3, publish_failures=3))
    exporter.saved(12, 4.0)
    found = values_of(scraped(port))
    assert found["april_trainer_up", ()] == 1
    assert found["april_trainer_step", ()] == 12
    assert found["april_trainer_total_steps", ()] == 40
    assert found["april_trainer_saved_step", ()] == 12
    assert found["april_trainer_steps_total", ()] == 2
    assert found["april_trainer_tokens_total", ()] == 100
    assert found["april_trainer_samples_total", ()] == 8
    assert found["april_trainer_reward_mean", ()] == 0.5
    assert found["april_trainer_actor_lr", ()] == 1e-4, "the last value stays"
    assert found["april_trainer_step_metric", (("name", "reward_parts/format"),)] == 1
    assert found["april_trainer_step_seconds_sum", ()] == 2
    assert found["april_trainer_phase_seconds_sum", (("phase", "save"),)] == 4
    assert found["april_trainer_phase_seconds_count", (("phase", "wait"),)] == 1
    assert found["april_trainer_nonfinite_updates_total", ()] == 1, "those before this process are not its own"
    assert found["april_trainer_publish_failures_total", ()] == 2


def test_open_metrics_if_the_scraper_asks_for_it(exporter, port) -> None:
    exporter.trained(1, dict.fromkeys(STEP_METRICS, 1.0), Totals())
    text = scraped(port, "application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    families = {family.name for family in open_families(text)}
    assert {spec.name.removesuffix("_total") for spec in TRAINER_CATALOGUE} <= families


def test_names_are_bounded_whatever_is_reported(exporter, port) -> None:
    for step in range(3):
        exporter.trained(step, {f"reward_parts/{step}-{n}": 1.0 for n in range(MAX_NAMES)}, Totals())
    exporter.trained(4, {"reward_parts/0-1": 7.0}, Totals())
    found = values_of(scraped(port))
    assert sum(name == "april_trainer_step_metric" for name, _ in found) == MAX_NAMES
    assert found["april_trainer_step_metric", (("name", "reward_parts/0-1"),)] == 7


def test_steps_and_scrapes_at_once_lose_nothing(exporter, port) -> None:
    stop, failures = threading.Event(), []

    def scrape() -> None:
        while not stop.is_set():
            try:
                values_of(scraped(port))
            except Exception as error:
                failures.append(error)

    thread = threading.Thread(target=scrape)
    thread.start()
    for step in range(300):
        exporter.trained(step, {f"m/{step % 50}": 1.0, "tokens/trained": 1}, Totals())
    stop.set()
    thread.join()
    assert failures == []
    assert values_of(scraped(port))["april_trainer_tokens_total", ()] == 300


def test_a_port_that_is_taken_is_one_clear_sentence(settings: RunSettings) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"127.0.0.1:{port} .*set trainer.metrics_port to another port"):
            open_exporter(with_trainer(settings, metrics_port=port))


def test_it_is_off_unless_a_port_is_set(settings: RunSettings) -> None:
    assert settings.trainer.metrics_port == 0
    assert isinstance(open_exporter(settings), NoExporter)


def test_names_of_series_are_stable() -> None:
    assert series_name("off_policy/token_share") == "april_trainer_off_policy_token_share"
    assert len({series_name(name) for name in STEP_METRICS}) == len(STEP_METRICS)


def test_a_training_serves_its_steps_while_it_runs(settings: RunSettings, tiny_model_dir, port) -> None:
    seen: dict[int, dict] = {}

    def looking(step: int, *rest):
        if step >= 1:
            seen[step] = values_of(scraped(port))
        return batch_of(step, *rest)

    with serving(FakeService(looking)) as service:
        train(with_trainer(settings, service_url=service.url, metrics_port=port, save_freq=1))
    assert seen[1]["april_trainer_up", ()] == 1
    assert seen[3]["april_trainer_total_steps", ()] == 3
    assert seen[3]["april_trainer_steps_total", ()] >= 1  # the batch of a step is asked for while the one before trains
    assert seen[3]["april_trainer_tokens_total", ()] > 0
    assert seen[3]["april_trainer_phase_seconds_count", (("phase", "update"),)] >= 1
    assert ("april_trainer_importance_ess", ()) in seen[3]
    with pytest.raises(httpx.TransportError):  # it ended with the training
        scraped(port)
