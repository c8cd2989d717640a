"""`april demo`: Redis, the rollout service and the trainer as separate processes, and what came of them."""

import json
import socket
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from importlib.resources import as_file, files
from pathlib import Path

import httpx
from rich.console import Console
from rich.live import Live
from rich.text import Text

from buffer.embedded import EmbeddedRedis
from deploy.demo.ending import ended_by_signals
from deploy.demo.summary import DemoSummary, Processes, live_line, summary_table
from deploy.processes import Child, start_april
from protocol.errors import SettingsError
from protocol.messages import Status
from protocol.settings import RunSettings, load_settings

POLL_S = 1.0  # people watch it
REPORT_WIDTH = 110  # a pipe has no width; the ledger's line needs this much
EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  what is bound there, and where to reach it from here
THREADS = {"OMP_NUM_THREADS": "1"}  # service and trainer share the machine: one core each on a small one


def run_demo(run_dir: Path | None, overrides: Sequence[str], json_file: Path | None) -> DemoSummary:
    """Run the whole loop and report; a signal ends all of it, the trainer first.

    Raises AprilError with the end of the log of the process that failed.
    """
    from deploy.demo.base_policy import default_cache_dir, make_base_policy
    from deploy.demo.progress import reporting

    started_s = time.monotonic()
    run_dir = (run_dir or Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}").absolute()
    with as_file(files("deploy.demo") / "demo.toml") as run_toml, ended_by_signals(), ExitStack() as stack:
        seed = load_settings(run_toml, [f"--run.dir={run_dir}", *overrides]).run.seed
        with reporting("base policy") as progress:
            policy = make_base_policy(default_cache_dir(), seed, progress)
        _say(f"the base policy is {policy}")
        redis = EmbeddedRedis(run_dir / "redis")
        stack.callback(redis.stop)
        redis.start()
        words = [str(run_toml), *following([*wiring(run_dir, policy), *overrides], run_toml, overrides)]
        settings = load_settings(run_toml, words[1:])
        env = THREADS | {"APRIL_BUFFER__URL": redis.url}  # not on the command line, where everyone reads it
        service = stack.enter_context(start_april("service", ["serve", *words], run_dir / "service.log", env))
        trainer = stack.enter_context(start_april("trainer", ["train", *words], run_dir / "trainer.log", env))
        _say(f"logs, checkpoints and metrics are in {run_dir}")
        status = _watch(settings, service, trainer)
        processes = Processes(service=service.pid, trainer=trainer.pid, redis=redis.pid)
    summary = _summarise(settings, status, processes, time.monotonic() - started_s)
    _report(summary, json_file)
    _say(f"all of it in one file, to look at or to send: april report {run_dir}")
    return summary


def wiring(run_dir: Path, policy: Path) -> list[str]:
    """What the launcher sets of a run: where it is, its policy, and a free port for its service."""
    port = _free_port()
    return [
        f"--run.dir={run_dir}",
        f"--model.path={policy}",
        f"--service.port={port}",
        f"--trainer.service_url=http://127.0.0.1:{port}",
    ]


def following(words: Sequence[str], run_toml: Path, given: Sequence[str]) -> list[str]:
    """`words`, and the service's address for the trainer where `given` may have moved the one and not the other."""
    if any(word.startswith("--trainer.service_url=") for word in given):
        return list(words)
    service = load_settings(run_toml, words).service
    if not service.port:
        raise SettingsError("service.port = 0 tells the trainer no port: leave it out, the demo takes a free one")
    host = EVERY_ADDRESS.get(service.host, service.host)
    shown = f"[{host}]" if ":" in host else host
    return [*words, f"--trainer.service_url=http://{shown}:{service.port}"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _watch(settings: RunSettings, service: Child, trainer: Child) -> Status:
    """Show progress until the trainer has ended; the service's last status."""
    with (
        httpx.Client(base_url=settings.trainer.service_url, headers=_login(settings), timeout=10) as client,
        _progress(settings.trainer.total_training_steps) as show,
    ):
        told = False
        while trainer.process.poll() is None:
            service.check_alive()
            if status := _status(client):
                if not told:
                    _tell_address(settings)
                    told = True
                show(status)
            time.sleep(POLL_S)
        trainer.check_alive()
        service.check_alive()
        client.post("/v1/pause").raise_for_status()
        return Status.model_validate(client.get("/v1/status").raise_for_status().json())


def _login(settings: RunSettings) -> dict[str, str]:
    token = settings.trainer.token or (settings.service.token and settings.service.token.get_secret_value())
    return {"Authorization": f"Bearer {token}"} if token else {}


def _tell_address(settings: RunSettings) -> None:
    """Where to look, as soon as there is something to see."""
    url = settings.trainer.service_url
    if settings.service.dashboard:
        page = f"{url}{settings.service.root_path}/dashboard"
        _say(f"the page of the run is at {page}", url=page)
    _say(f"in a terminal: april top {url}")


def _status(client: httpx.Client) -> Status | None:
    try:
        response = client.get("/v1/status")
    except httpx.TransportError:  # it is still starting; check_alive tells if it died
        return None
    return Status.model_validate(response.json()) if response.is_success else None


@contextmanager
def _progress(steps: int | None) -> Generator[Callable[[Status], None]]:
    """On a terminal one line that changes; otherwise a JSON line for each trained step."""
    if sys.stdout.isatty():
        with Live(console=Console(), transient=True, auto_refresh=False) as live:
            yield lambda status: live.update(Text(live_line(status)), refresh=True)
        return
    shown = -1

    def show(status: Status) -> None:
        nonlocal shown
        if status.trained_step != shown:
            shown = status.trained_step
            reward = status.trainer_metrics.get("reward/mean")
            line = {"event": "step", "step": shown, "steps": steps, "reward": reward, "waits": status.waits}
            print(json.dumps(line), flush=True)

    yield show


def _summarise(settings: RunSettings, status: Status, processes: Processes, wall_s: float) -> DemoSummary:
    trained = json.loads((settings.trainer_dir / "summary.json").read_text())
    return DemoSummary(
        steps=trained["steps"],
        wall_s=round(wall_s, 1),
        eval_reward_before=trained["eval_reward_before"],
        eval_reward_after=trained["eval_reward_after"],
        groups_consumed=status.ledger.consumed,
        samples_trained=trained["samples_trained"],
        samples_resumed=trained["samples_resumed"],
        samples_multi_version=trained["samples_multi_version"],
        tokens_generated=status.counters.get("tokens_appended", 0),
        tokens_trained=trained["tokens_trained"],
        off_policy_token_share=trained["off_policy_token_share"],
        mean_lag=trained["mean_lag"],
        max_lag=trained["max_lag"],
        surplus_groups_kept=status.counters.get("surplus_groups_kept", 0),
        ledger=status.ledger,
        ledger_error=status.ledger_error,
        processes=processes,
    )


def _report(summary: DemoSummary, json_file: Path | None) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=REPORT_WIDTH)
    console.print(summary_table(summary))
    _say("what it learned is mostly to stop being lazy: the base policy was made to give up early")
    if json_file:
        json_file.write_text(summary.model_dump_json(indent=2) + "\n")


def _say(text: str, **fields: str) -> None:
    """A sentence; programs get `fields` beside it."""
    print(text if sys.stdout.isatty() else json.dumps({"event": "note", "text": text, **fields}), flush=True)
