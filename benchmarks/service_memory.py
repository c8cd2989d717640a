"""Memory of the rollout service by the number of samples that run: real processes, real Redis, simulated engine.

Every row is a service of its own, so that nothing that an earlier one allocated is counted.
"""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx

from deploy.demo.byte_model import make_tokenizer
from protocol.messages import Status
from protocol.settings import RunSettings
from protocol.states import SampleState

GROUP_SAMPLES = 4
NUM_PROMPTS = 5000
RESPONSE_TOKENS = 4096
STEP_S = 1.0  # 10k streams take a good part of a second of one core for each of their tokens
TOKENS_EACH = 16  # that the buffer has of each sample before the memory is read, so that checkpoints have happened
CHECKPOINT_S = 5.0
PATIENCE_S = 300.0
POLL_S = 0.25

TOML = """
[run]
dir = "{folder}/run"
[model]
tokenizer_path = "{folder}/tokenizer"
[data]
source = "benchmarks.service_memory:rows"
apply_chat_template = false
train_batch_size = {num_groups}
max_prompt_length = 64
max_response_length = {response_tokens}
[reward]
name = "benchmarks.service_memory:score"
num_workers = 1
[rollout]
n = {group_samples}
ratio = 1.0
checkpoint_interval_s = {checkpoint_s}
stop_token_ids = [0]
[engine]
backend = "simulated"
max_num_seqs = {num_samples}
[engine.simulated]
median_tokens = {response_tokens}
sigma = 0.0
step_base_s = {step_s}
step_per_sequence_s = 0.0
[service]
port = {port}
"""


def rows(_: RunSettings) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Prompts of some forty tokens, and one held-out one."""
    made = [{"prompt": f"{n:040d}", "ground_truth": "0", "data_source": "memory"} for n in range(NUM_PROMPTS + 1)]
    return made[:-1], made[-1:]


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """Nothing finishes while memory is measured."""
    return 0.0


def service_memory(folder: Path, counts: list[int]) -> list[dict[str, object]]:
    """One row for each number of running samples; the first is what the others are compared with."""
    make_tokenizer().save_pretrained(folder / "tokenizer")
    found: list[dict[str, object]] = []
    base: tuple[int, float] | None = None
    for count in counts:
        own = folder / str(count)
        own.mkdir()
        (own / "tokenizer").symlink_to(folder / "tokenizer")
        num_bytes, status = _measure(own, count)
        running, megabytes = status.samples[SampleState.RUNNING], num_bytes / 1e6
        base = base or (running, megabytes)
        more = running - base[0]
        each = (megabytes - base[1]) * 1e3 / more if more else float("nan")
        stored = status.counters["tokens_appended"] / running
        found.append(
            {"samples running": running, "MB resident": megabytes, "kB/sample more": each, "tokens stored each": stored}
        )
    return found


def _measure(folder: Path, num_samples: int) -> tuple[int, Status]:
    """Resident bytes of a service when all samples run and have been checkpointed, and its status then."""
    port = _free_port()
    toml = folder / "run.toml"
    toml.write_text(
        TOML.format(
            folder=folder,
            num_groups=-(-num_samples // GROUP_SAMPLES),
            group_samples=GROUP_SAMPLES,
            num_samples=num_samples,
            response_tokens=RESPONSE_TOKENS,
            checkpoint_s=CHECKPOINT_S,
            step_s=STEP_S,
            port=port,
        )
    )
    with _serving(toml, folder / "serve.log") as process, httpx.Client(timeout=60.0) as client:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                break
            status = _status(client, port)
            if status is not None and status.counters.get("tokens_appended", 0) >= TOKENS_EACH * num_samples:
                return _resident_bytes(process.pid), status
            time.sleep(POLL_S)
    tail = (folder / "serve.log").read_text(errors="replace")[-2000:]
    raise RuntimeError(f"the service did not run {num_samples} samples within {PATIENCE_S:g} s:\n{tail}")


@contextlib.contextmanager
def _serving(toml: Path, log: Path) -> Generator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "deploy.cli", "serve", str(toml)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()  # its Redis ends with it; nothing of the run is needed
        process.wait()


def _status(client: httpx.Client, port: int) -> Status | None:
    try:
        response = client.get(f"http://127.0.0.1:{port}/v1/status")
    except httpx.TransportError:
        return None
    return Status.model_validate(response.json()) if response.is_success else None


def _resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
