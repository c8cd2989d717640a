"""Whole processes: the command line as a user types it, on a random tiny model."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from deploy.processes import Child, start_april
from protocol.messages import Status

ROOT = Path(__file__).parents[2]
ENV = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Run:
    """A run's TOML and how to start its processes."""

    toml: Path
    folder: Path
    client: httpx.Client
    stack: contextlib.ExitStack
    num_children: int = 0

    def start(self, command: str, *words: str) -> Child:
        """`april COMMAND run.toml WORDS` as a child with a log of its own."""
        self.num_children += 1
        log = self.folder / f"{command}-{self.num_children}.log"
        return self.stack.enter_context(start_april(command, [command, str(self.toml), *words], log, ENV))

    def status(self) -> Status | None:
        """The service's status, or None while it starts."""
        try:
            response = self.client.get("/v1/status")
        except httpx.TransportError:
            return None
        return Status.model_validate(response.json()) if response.is_success else None

    def until(self, condition: Callable[[Status], bool], *children: Child) -> Status:
        """Wait for a status; a child that ends meanwhile fails the test with its log."""
        while True:
            for child in children:
                child.check_alive()
            if (status := self.status()) and condition(status):
                return status
            time.sleep(0.05)


@pytest.fixture
def run(tmp_path: Path, tiny_model_dir: Path) -> Iterator[Run]:
    port = free_port()
    toml = tmp_path / "run.toml"
    toml.write_text(f"""
[run]
name = "system"
dir = "{tmp_path / "run"}"
[model]
path = "{tiny_model_dir}"
[data]
source = "tests.support.tasks:rows"
apply_chat_template = false
train_batch_size = 4
max_prompt_length = 16
max_response_length = 48
[reward]
name = "tests.support.tasks:score"
[rollout]
n = 2
checkpoint_interval_s = 0.2
[engine]
max_num_seqs = 16
num_threads = 1
[actor.optim]
lr = 1e-4
[service]
port = {port}
[trainer]
service_url = "http://127.0.0.1:{port}"
total_training_steps = 8
save_freq = 2
logger = ["jsonl"]
""")
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client, contextlib.ExitStack() as stack:
        yield Run(toml, tmp_path, client, stack)
