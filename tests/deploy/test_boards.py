"""Code, reference page, alert rules and boards in step; and a real Prometheus that answers every expression."""

import asyncio
import json
import re
import shutil
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvicorn
import yaml

from deploy.grafana.boards import BOARDS, FOLDER, board_files
from deploy.grafana.model import DATA_SOURCE, GRID_WIDTH
from deploy.prometheus.check import EMPTY, Targets, ask_all, expressions, running_prometheus
from deploy.prometheus.page import metrics_page
from rollout_service.app.build import build_app
from rollout_service.metrics.catalogue import SERVICE_CATALOGUE
from tests.support.cluster import free_port
from tests.support.service import TestService, running_service, service_settings
from trainer.metric_catalogue import PHASES, STEP_METRICS, TRAINER_CATALOGUE
from trainer.prometheus import PrometheusExporter
from trainer.summary import Totals

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
NAME = re.compile(r"\b(?:april|process|python)_[a-z0-9_]+\b")
OF_OTHERS = {"process_cpu_seconds_total", "process_resident_memory_bytes"}  # of prometheus_client itself
SERIES = SERVICE_CATALOGUE.series | TRAINER_CATALOGUE.series | OF_OTHERS
LABEL_VALUES = re.compile(r'"[^"]*"')

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")


def names_in(expr: str) -> set[str]:
    return set(NAME.findall(LABEL_VALUES.sub('""', expr)))


def rules() -> list[dict]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_the_page_is_what_the_catalogues_print():
    assert (ROOT / "docs" / "metrics.md").read_text() == metrics_page(), "python -m deploy.prometheus > docs/metrics.md"


def test_the_boards_on_disk_are_what_the_code_makes():
    made = board_files()
    assert {path.name for path in FOLDER.glob("*.json")} == set(made)
    for name, text in made.items():
        assert (FOLDER / name).read_text() == text, "python -m deploy.grafana"


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_a_board_asks_only_for_metrics_that_exist(board):
    for query in board.queries:
        assert names_in(query.expr), query.expr
        assert names_in(query.expr) <= SERIES, query.expr
        assert query.expr.count("@") >= 1, f"{query.expr} ignores the choice of the run"


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_a_board_explains_itself_and_its_panels_do_not_overlap(board):
    model = json.loads(board_files()[f"{board.uid.removeprefix('april-')}.json"])
    taken: set[tuple[int, int]] = set()
    assert len({panel["id"] for panel in model["panels"]}) == len(model["panels"])
    for panel in model["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= GRID_WIDTH
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"], panel["title"]
            assert panel["datasource"] == DATA_SOURCE
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
            assert not any("@" in target["expr"] or "WINDOW" in target["expr"] for target in panel["targets"])


def test_boards_have_addresses_of_their_own():
    assert len({board.uid for board in BOARDS}) == len(BOARDS)


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_a_rule_asks_only_for_metrics_that_exist_and_says_what_to_do(rule):
    names = names_in(rule["expr"])
    assert names <= SERIES
    assert names or "up{" in rule["expr"]
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"]


def test_every_alert_is_tested_and_documented():
    tested = (PROMETHEUS / "alerts.test.yml").read_text()
    page = (ROOT / "docs" / "monitoring.md").read_text()
    for rule in rules():
        assert rule["alert"] in tested
        assert f"`{rule['alert']}`" in page


@needs_promtool
def test_promtool_takes_configuration_and_rules(tmp_path):
    for name in ("prometheus.yml", "alerts.yml", "alerts.test.yml"):
        shutil.copy(PROMETHEUS / name, tmp_path)
    (tmp_path / "token").write_text("t")
    for words in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts.test.yml"]):
        done = subprocess.run(["promtool", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


@asynccontextmanager
async def served(service: TestService):
    """The service's app over real HTTP; gives HOST:PORT."""
    port = free_port()
    config = uvicorn.Config(build_app(service.host), port=port, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve())  # without signal handlers: pytest's own stay
    try:
        await service.until(lambda: server.started)
        yield f"127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving


def step_metrics(step: int) -> dict[str, float]:
    """What a trainer reports of a step."""
    named = dict.fromkeys(STEP_METRICS, 0.5 + step) | {f"timing_s/{phase}": 0.01 for phase in PHASES}
    by_lag = {f"{name}_{lag}": 0.5 for lag in (0, 1) for name in ("importance_by_lag/ess", "mismatch_by_lag/mean")}
    by_lag |= {f"importance_by_lag/clipped_share_{lag}": 0.0 for lag in (0, 1)}
    rest = {"timing_s/step": 0.1, "off_policy/kl_behaviour_proximal_k1": 0.1, "samples/trained": 8.0}
    return named | by_lag | rest | {"mismatch/lag0_max": 0.1}


async def train_for_ever(service: TestService, exporter: PrometheusExporter) -> None:
    """A trainer that takes no time."""
    headers = await service.open_trainer()
    exporter.planned(1000, 0, Totals())
    step = 0
    while True:
        step += 1
        await service.batch(step, headers)
        await service.publish(step, headers)
        metrics = step_metrics(step)
        exporter.trained(step, metrics, Totals(steps=step))
        exporter.saved(step, 0.01)
        body = {"step": step, "metrics": metrics}
        assert (await service.client.post("/v1/trainers/metrics", json=body, headers=headers)).status_code == 204
        await service.client.post(f"/v1/batches/{step}/ack", headers=headers)
        await asyncio.sleep(0.1)


@needs_prometheus
@pytest.mark.slow
async def test_a_real_prometheus_answers_every_expression_of_the_boards(tmp_path):
    settings = service_settings(tmp_path, rollout={"autotune": "shadow", "samples_ratio": 1.5, "max_lag": 6})
    port = free_port()
    exporter = PrometheusExporter("test", "127.0.0.1", port)
    answers = expressions(BOARDS)
    async with running_service(settings) as service, served(service) as address:
        training = asyncio.create_task(train_for_ever(service, exporter))
        try:
            targets = Targets(address, f"127.0.0.1:{port}")
            rules_seen = await asyncio.to_thread(_ask, tmp_path, targets, answers)
        finally:
            training.cancel()
            exporter.close()
            await asyncio.gather(training, return_exceptions=True)
    told_by_no_simulated_engine = ("april_engine_kv_use", "april_engine_preemptions_total")
    assert [a.expr for a in answers if a.value is None] == [
        a.expr for a in answers if any(name in a.expr for name in told_by_no_simulated_engine)
    ]
    assert {rule["name"] for rule in rules_seen} == {rule["alert"] for rule in rules()}
    assert [rule["name"] for rule in rules_seen if rule["health"] != "ok"] == []


def _ask(folder: Path, targets: Targets, answers: list) -> list[dict]:
    excused = [a for a in answers if any(name in a.expr for name in EMPTY if name.startswith("april_engine_"))]
    with running_prometheus(folder, targets) as server:
        ask_all(server, [a for a in answers if a not in excused], 90)
        ask_all(server, [a for a in excused if "drift" in a.expr], 5)
        return server.rules()
