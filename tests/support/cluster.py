"""A whole system as processes, for tests that kill them: Redis behind a proxy, the service behind another, trainers.

Always true:
- every process is a child with a log of its own and is ended by its own id when the block is left, stopped ones too;
- whatever ends is started again by `supervise`, as a supervisor would, and written down;
- what the processes wrote to the journal, and what Redis holds in the end, is all that a checker is given.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from buffer.embedded import find_server
from buffer.redis_buffer import RedisBuffer
from protocol.errors import NotFoundError
from protocol.failpoints import VARIABLE
from protocol.messages import Status
from protocol.settings import RunSettings, load_settings
from protocol.settings.rollout import EngineBackend
from protocol.states import GroupState
from rollout_service.prompts.user_source import call_source
from tests.support.journal import Journal
from tests.support.scenes import TOML
from tests.support.tcp_proxy import TcpProxy

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
POLL_S = 0.05
ORDERLY_END_S = 30.0


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Process:
    """A child and its log."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path
    stopped: bool = False
    armed: bool = False  # with a failpoint, which may strike in its last moments

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def kill(self) -> None:
        """SIGKILL, and wait."""
        if self.alive:
            self.popen.kill()
        self.popen.wait()

    def stop(self) -> None:
        """SIGSTOP."""
        if self.alive:
            self.popen.send_signal(signal.SIGSTOP)
            self.stopped = True

    def go_on(self) -> None:
        """SIGCONT."""
        if self.alive:
            self.popen.send_signal(signal.SIGCONT)
        self.stopped = False

    def end(self) -> int:
        """SIGTERM and wait; SIGKILL if that takes too long. Its exit code."""
        self.go_on()
        if self.alive:
            self.popen.terminate()
        try:
            return self.popen.wait(ORDERLY_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.popen.returncode

    def tail(self, lines: int = 30) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@dataclass
class System:
    """The processes of one run; make it with `open_system`."""

    folder: Path
    settings: RunSettings
    toml: Path
    redis_port: int
    proxy: TcpProxy
    front: TcpProxy
    journal: Journal
    client: httpx.Client
    overrides: tuple[str, ...] = ()
    redis: Process | None = None
    service: Process | None = None
    trainers: list[Process] = field(default_factory=list[Process])
    num_started: Counter[str] = field(default_factory=Counter[str])
    children: list[Process] = field(default_factory=list[Process])

    @property
    def history_folder(self) -> Path:
        """Where the processes write their history."""
        return self.folder / "history"

    # Processes

    def start_redis(self) -> Process:
        """A server on the folder's AOF; it answers when this returns."""
        data = self.folder / "redis"
        data.mkdir(exist_ok=True)
        words = [str(find_server()), "--port", str(self.redis_port), "--bind", "127.0.0.1", "--dir", str(data)]
        words += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--maxmemory-policy", "noeviction"]
        self.redis = self._start("redis", words)
        until(lambda: _listens(self.redis_port), self.redis)
        return self.redis

    def start_service(self, fail: str = "", *words: str) -> Process:
        """`april serve` on a port of its own, to which connections go from now on; it listens some seconds later."""
        port = free_port()
        command = [sys.executable, "-m", "tests.support.witness", str(self.history_folder)]
        command += ["serve", str(self.toml), f"--service.port={port}", *self.overrides, *words]
        self.service = self._start("service", command, {VARIABLE: fail} if fail else {})
        self.front.target_port = port
        self.front.drop_connections()
        return self.service

    def start_trainer(self, fail: str = "", *words: str) -> Process:
        """One more life of the scripted trainer, on the same checkpoints."""
        command = [sys.executable, "-m", "tests.support.scripted_trainer"]
        command += [f"--url={self.settings.trainer.service_url}", f"--folder={self.settings.trainer_dir}"]
        command += [f"--weights={self.settings.weights_root}", f"--journal={self.history_folder}", *words]
        if self.settings.model.path is not None:
            command.append(f"--model={self.settings.model.path}")
        trainer = self._start("trainer", command, {VARIABLE: fail} if fail else {})
        self.trainers.append(trainer)
        return trainer

    def _start(self, name: str, command: list[str], environment: Mapping[str, str] | None = None) -> Process:
        self.num_started[name] += 1
        log = self.folder / f"{name}-{self.num_started[name]}.log"
        with log.open("ab") as output:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT, **(environment or {})},
                start_new_session=True,
            )
        self.journal.write("started", process=name, child=popen.pid, failpoint=(environment or {}).get(VARIABLE, ""))
        child = Process(name, popen, log, armed=VARIABLE in (environment or {}))
        self.children.append(child)
        return child

    def kill(self, process: Process) -> None:
        """SIGKILL, and wait; the history says when, so that nobody takes the kill for a failure."""
        self.journal.write("kill", process=process.name, child=process.popen.pid)
        process.kill()

    def supervise(self, arm: Callable[[str], str]) -> None:
        """Start again what has ended; `arm` says with which failpoint."""
        if self.redis is not None and not self.redis.alive:
            self.ended(self.redis)
            self.start_redis()
        if self.service is not None and not self.service.alive:
            self.ended(self.service)
            self.start_service(arm("service"))
        for trainer in [t for t in self.trainers if not t.alive]:
            self.ended(trainer)
            self.trainers.remove(trainer)
        if not self.trainers:
            self.start_trainer(arm("trainer"))

    def ended(self, process: Process) -> None:
        """Write down how a process ended."""
        code = process.popen.wait()
        self.journal.write("ended", process=process.name, child=process.popen.pid, code=code)

    # What is seen

    def status(self) -> Status | None:
        """The service's status, written to the history; None while it is away."""
        asked_at = time.monotonic()
        try:
            response = self.client.get("/v1/status")
        except httpx.TransportError:
            return None
        if not response.is_success:
            return None
        status = Status.model_validate(response.json())
        self.journal.write("status", asked_at=asked_at, **status.model_dump(mode="json", include=STATUS_FIELDS))
        return status

    def until(self, condition: Callable[[Status], bool], *processes: Process, patience_s: float = 120.0) -> Status:
        """Wait for a status; raises with the end of the log of one of `processes` that ended meanwhile."""
        deadline = time.monotonic() + patience_s
        while True:
            if (status := self.status()) and condition(status):
                return status
            for process in processes:
                if not process.alive:
                    code = process.popen.returncode
                    raise AssertionError(f"the {process.name} ended with {code}:\n{process.tail()}")
            if time.monotonic() > deadline:
                tail = self.service.tail() if self.service else ""
                raise AssertionError(f"not reached in {patience_s:g} s, the last status was {status}\n{tail}")
            time.sleep(POLL_S)

    def record_final(self) -> None:
        """Write down what Redis holds and what the newest checkpoint says; nothing else may run."""
        state = asyncio.run(_final_state(self.settings, self.redis_port))
        self.journal.write("final", **state, history=self.survived())

    def survived(self) -> dict[str, Any]:
        """Step -> [digest, groups] of the newest checkpoint of the scripted trainers."""
        paths = sorted(self.settings.trainer_dir.glob("step-*.json"))
        return json.loads(paths[-1].read_text())["history"] if paths else {}


STATUS_FIELDS = {
    "pid", "service_epoch", "trainer_epoch", "active_version", "newest_version", "trained_step", "durable_step",
    "ledger", "ledger_error", "counters", "samples", "waits", "engines",
}  # fmt: skip


@contextlib.contextmanager
def open_system(folder: Path, model: Path, text: str = TOML, overrides: Sequence[str] = ()) -> Generator[System]:
    """A run in `folder`: its settings, its proxy, and a running Redis; service and trainers are yet to be started.

    `overrides`: `--section.field=value`, for every service of the run.
    """
    redis_port = free_port()
    with contextlib.ExitStack() as stack:
        proxy = stack.enter_context(TcpProxy(redis_port))
        front = stack.enter_context(TcpProxy(0))
        toml = folder / "run.toml"
        values = {"folder": folder / "run", "model": model, "port": front.port, "redis_port": proxy.port}
        toml.write_text(text.format(**values))
        settings = load_settings(toml, overrides)
        (folder / "run" / "weights").mkdir(parents=True)
        journal = Journal(folder / "history")
        stack.callback(journal.close)
        client = stack.enter_context(httpx.Client(base_url=settings.trainer.service_url, timeout=2.0))
        system = System(folder, settings, toml, redis_port, proxy, front, journal, client)
        system.overrides = tuple(overrides)
        stack.callback(lambda: [child.kill() for child in system.children])
        journal.write("config", **_config(settings))
        system.start_redis()
        yield system


def until(condition: Callable[[], bool], *processes: Process, patience_s: float = 60.0) -> None:
    """Wait for a condition; a process that ends meanwhile is an error."""
    deadline = time.monotonic() + patience_s
    while not condition():
        for process in processes:
            assert process.alive, f"the {process.name} ended with {process.popen.returncode}:\n{process.tail()}"
        assert time.monotonic() < deadline, f"not reached in {patience_s:g} s"
        time.sleep(POLL_S)


class Watcher(threading.Thread):
    """Asks for the status all the time, so that the history holds every state that lasts."""

    def __init__(self, system: System) -> None:
        super().__init__(name="watcher", daemon=True)
        self._system = system
        self._ended = threading.Event()
        self.seen: Status | None = None

    def run(self) -> None:
        """Until `end`."""
        while not self._ended.wait(POLL_S):
            self.seen = self._system.status() or self.seen

    def end(self) -> None:
        """Stop asking."""
        self._ended.set()
        self.join()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0) as probe:
        probe.sendall(b"PING\r\n")
        return probe.recv(16).startswith(b"+PONG")
    return False


def _config(settings: RunSettings) -> dict[str, Any]:
    assert settings.data.source is not None, "scenes have one"
    simulated = settings.engine.simulated
    return {
        "seed": settings.run.seed,
        "median_tokens": simulated.median_tokens,
        "sigma": simulated.sigma,
        "max_response_length": settings.data.max_response_length,
        "max_lag": settings.rollout.max_lag,
        "batch_groups": settings.data.train_batch_size,
        "num_prompts": len(call_source(settings.data.source, settings)[0]),
        "simulated": settings.engine.backend is EngineBackend.SIMULATED,
        "step_s": simulated.step_base_s if settings.engine.backend is EngineBackend.SIMULATED else None,
        "checkpoint_interval_s": settings.rollout.checkpoint_interval_s,
        "sample_lease_s": settings.buffer.sample_lease_s,
        "max_sample_failures": settings.rollout.max_sample_failures,
    }


async def _final_state(settings: RunSettings, redis_port: int) -> dict[str, Any]:
    buffer = await RedisBuffer.connect(f"redis://127.0.0.1:{redis_port}", run=settings.run.name)
    try:
        snapshot, recount = await buffer.snapshot(), await buffer.recount()
        briefs = await buffer.open_groups()
        groups = await buffer.groups([brief.group_id for brief in briefs])
        leases = await buffer.batch_leases()
        policies = await buffer.policies()
        listed = {brief.group_id for brief in briefs} | {i for lease in leases for i in lease.group_ids}
        dropped = await _dropped(buffer, snapshot.ledger.admitted) if snapshot.ledger.dropped else []
    finally:
        await buffer.close()
    return {
        "ledger": snapshot.ledger.model_dump(),
        "recount_faults": list(recount.faults),
        "open": [b.group_id for b in briefs if b.state is GroupState.OPEN],
        "ready": [b.group_id for b in briefs if b.state is GroupState.READY],
        "leased": {str(lease.step): list(lease.group_ids) for lease in leases},
        "dropped": [group_id for group_id in dropped if group_id not in listed],
        "policies": [[policy.version, policy.step] for policy in policies],
        "prompts": {group.group_id: group.prompt.prompt_id for group in groups},
        "samples": {
            sample.sample_id: [[s.start, s.version, s.tokens.tolist(), s.logprobs.tolist()] for s in sample.segments]
            for group in groups
            for sample in group.samples
        },
        "continued": {
            sample.sample_id: sample.continued_from
            for group in groups
            for sample in group.samples
            if sample.continued_from
        },
    }


async def _dropped(buffer: RedisBuffer, num_admitted: int) -> list[str]:
    """Dropped groups, which the buffer remembers by their tombstones."""
    found: list[str] = []
    for number in range(num_admitted):
        with contextlib.suppress(NotFoundError):
            (group,) = await buffer.groups([f"g{number:09d}"])
            if group.state is GroupState.DROPPED:
                found.append(group.group_id)
    return found
