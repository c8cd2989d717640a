"""Whether every picture of the boards and every alert rule gets data: a Prometheus on loopback against a running run.

`python -m deploy.prometheus.check --service http://127.0.0.1:8040 --trainer 127.0.0.1:9101` starts the `prometheus`
binary in a temporary folder, asks each expression again and again until it has answered with a number or the time is
over, and prints what had none. It exits with 1 if one had none that EMPTY doesn't excuse.

Always true: the Prometheus that it starts ends with it; nothing outside the temporary folder is written.
"""

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx

from deploy.grafana.boards import BOARDS
from deploy.grafana.model import Board, filled_in
from protocol.errors import SettingsError, UnavailableError

SCRAPE_S = 1  # of a run that takes minutes: the rates of the boards need several looks
WINDOW = "5m"
POLL_S = 1.0
START_S = 30.0
STOP_S = 20.0
RULES = Path(__file__).parent / "alerts.yml"

EMPTY: Mapping[str, str] = {
    "april_ratio_wanted": "only with rollout.autotune",
    "april_raced_mean_tokens": "only with rollout.samples_ratio above 1",
    "april_engine_kv_use": "only from engines that tell it (the simulated one doesn't)",
    "april_engine_preemptions_total": "only from engines that tell it (the simulated one doesn't)",
    "april_engine_drift": "only when a step has tokens of lag 0 (with a lookahead few have)",
    "mismatch/lag0_max": "only when a step has tokens of lag 0 (with a lookahead few have)",
    "eval/reward": "only after an evaluation",
}
"""Parts of expressions that have no data in a run that is well, and why."""


@dataclass(slots=True)
class Answer:
    """One expression, and what came of it."""

    board: str
    panel: str
    expr: str
    num_series: int = 0
    value: float | None = None

    @property
    def excuse(self) -> str | None:
        """Why it may have no data."""
        return next((why for part, why in EMPTY.items() if part in self.expr), None)

    @property
    def is_missing(self) -> bool:
        """It has no data, and should."""
        return self.value is None and self.excuse is None


@dataclass(frozen=True, slots=True)
class Targets:
    """What is scraped. Addresses are HOST:PORT."""

    service: str
    trainer: str | None = None
    token: str | None = None
    run: str = "april"


@dataclass(slots=True)
class Prometheus:
    """A running server."""

    client: httpx.Client
    log: Path
    data: dict[str, Any] = field(default_factory=dict[str, Any])

    def ask(self, expr: str) -> list[float]:
        """The finite values of an instant query. Raises UnavailableError for an expression that it refuses."""
        response = self.client.get("/api/v1/query", params={"query": expr})
        body = response.json()
        if body["status"] != "success":
            raise UnavailableError(f"Prometheus refuses {expr!r}: {body['error']}; mend the board")
        found = body["data"]["result"]
        values = [float(found[1])] if body["data"]["resultType"] == "scalar" else [float(r["value"][1]) for r in found]
        return [value for value in values if math.isfinite(value)]

    def rules(self) -> list[dict[str, Any]]:
        """The alert rules as it has loaded them, with their health."""
        groups = self.client.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def is_ready(self) -> bool:
        """Whether it answers queries."""
        try:
            return self.client.get("/-/ready").is_success
        except httpx.TransportError:
            return False


def expressions(boards: Sequence[Board]) -> list[Answer]:
    """Every expression of the boards, without an answer yet."""
    return [
        Answer(board.uid, panel.title, filled_in(query.expr, 'run=~".*"', WINDOW))
        for board in boards
        for row in board.rows
        for panel in row.panels
        for query in panel.queries
    ]


@contextmanager
def running_prometheus(folder: Path, targets: Targets) -> Generator[Prometheus]:
    """A Prometheus that scrapes the targets once a second; it ends when the block is left."""
    binary = shutil.which("prometheus")
    if binary is None:
        raise SettingsError("there is no `prometheus` on this machine: install it (Debian: apt-get install prometheus)")
    config = folder / "prometheus.yml"
    config.write_text(json.dumps(_config(targets)))  # JSON is YAML
    os.chmod(config, 0o600)  # the token is in it
    port, log = _free_port(), folder / "prometheus.log"
    command = [binary, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)  # noqa: S603
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10.0) as client:
            server = Prometheus(client, log)
            deadline_s = time.monotonic() + START_S
            while not server.is_ready():
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise UnavailableError(f"Prometheus did not start: {log.read_text(errors='replace')[-1000:]}")
                time.sleep(POLL_S / 10)
            yield server
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ask_all(server: Prometheus, answers: Sequence[Answer], wanted_s: float) -> None:
    """Ask each until it has data; until all that should have some have it, or `wanted_s` is over."""
    deadline_s = time.monotonic() + wanted_s
    while time.monotonic() < deadline_s:
        for answer in answers:
            if answer.value is None and (values := server.ask(answer.expr)):
                answer.num_series, answer.value = len(values), values[0]
        if not any(answer.is_missing for answer in answers):
            return
        time.sleep(POLL_S)


def _config(targets: Targets) -> dict[str, Any]:
    service = _job("april-service", targets.service, targets.run)
    if targets.token:
        service["authorization"] = {"credentials": targets.token}
    jobs = [service]
    if targets.trainer:
        jobs.append(_job("april-trainer", targets.trainer, targets.run))
    every = {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    return {"global": every, "rule_files": [str(RULES)], "scrape_configs": jobs}


def _job(name: str, target: str, run: str) -> dict[str, Any]:
    return {"job_name": name, "static_configs": [{"targets": [target], "labels": {"run": run}}]}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@click.command()
@click.option("--service", default="127.0.0.1:8040", show_default=True, help="HOST:PORT of the rollout service.")
@click.option("--trainer", help="HOST:PORT of the trainer's metrics (trainer.metrics_port).")
@click.option("--seconds", default=120.0, show_default=True, help="How long to wait for data.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the answers as JSON.")
def main(service: str, trainer: str | None, seconds: float, json_file: Path | None) -> None:
    """Ask every expression of the boards of a running run. The token is taken from APRIL_SERVICE__TOKEN."""
    targets = Targets(service.removeprefix("http://").rstrip("/"), trainer, os.environ.get("APRIL_SERVICE__TOKEN"))
    answers = expressions(BOARDS)
    with (
        tempfile.TemporaryDirectory(prefix="april-prometheus-") as folder,
        running_prometheus(Path(folder), targets) as server,
    ):
        ask_all(server, answers, seconds)
        bad_rules = [f"{rule['name']}: {rule['lastError']}" for rule in server.rules() if rule["health"] == "err"]
    for answer in answers:
        if answer.value is None:
            print(f"no data: {answer.board} / {answer.panel}: {answer.expr} ({answer.excuse or 'SHOULD HAVE SOME'})")
    print(f"{sum(a.value is not None for a in answers)} of {len(answers)} expressions have data")
    if json_file:
        rows = [
            {"board": a.board, "panel": a.panel, "expr": a.expr, "series": a.num_series, "value": a.value}
            for a in answers
        ]
        json_file.write_text(json.dumps(rows, indent=2) + "\n")
    sys.exit(int(bool(bad_rules) or any(answer.is_missing for answer in answers)))


if __name__ == "__main__":
    main()
