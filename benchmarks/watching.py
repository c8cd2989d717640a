"""What watching costs: metrics, events and pictures against a service without them, on the simulated engine.

Services are real processes with a Redis of their own. They take turns in one run: a turn is a step of a trainer that
takes no time, from its report to the next batch, so that whatever else the machine does falls on all of them alike.
The CPU time is that of the service's process. Where everything is on, a page is open and Prometheus scrapes.
"""

import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx

from benchmarks.report import report
from deploy.demo.byte_model import make_tokenizer
from protocol.batch import MEDIA_TYPE
from protocol.messages import TRAINER_EPOCH_HEADER
from protocol.settings import RunSettings

GROUPS, GROUP_SAMPLES = 32, 8
SCRAPE_S = 15.0  # Prometheus' own default here
START_S = 120.0
STREAM_S = 10.0  # for which events are counted
PARK_S = 2.0  # after a pause: everything is parked within milliseconds
WARM_UP_TURNS = 2  # the first rounds load code and fill the buffer
OFF = ("--service.metrics=false", "--service.watch=false")
VARIANTS: Mapping[str, tuple[str, ...]] = {"all on": (), "metrics and watch off": OFF}
BASELINE = "metrics and watch off"

TOML = """
[run]
dir = "{folder}/run"
[model]
tokenizer_path = "{folder}/tokenizer"
[data]
source = "benchmarks.watching:rows"
apply_chat_template = false
train_batch_size = {groups}
max_prompt_length = 64
max_response_length = 1024
[reward]
name = "benchmarks.watching:score"
num_workers = 1
[rollout]
n = {samples}
ratio = 1.5
lookahead = 0
max_lag = 4
stop_token_ids = [0]
[engine]
backend = "simulated"
max_num_seqs = {slots}
[engine.simulated]
median_tokens = 150
step_base_s = 0.01
step_per_sequence_s = 0.0
[service]
port = {port}
"""


def rows(_: RunSettings) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Prompts of some forty tokens, and one held-out one."""
    made = [{"prompt": f"{n:040d}", "ground_truth": "0", "data_source": "watching"} for n in range(20_001)]
    return made[:-1], made[-1:]


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """Half of the responses are right."""
    return float(len(solution_str) % 2)


@dataclass(slots=True)
class Watched:
    """One service, and a trainer that takes no time."""

    name: str
    process: subprocess.Popen[bytes]
    client: httpx.AsyncClient
    headers: dict[str, str] = field(default_factory=dict[str, str])
    step: int = 0
    cpu_s: list[float] = field(default_factory=list[float])
    wall_s: list[float] = field(default_factory=list[float])

    async def open(self) -> None:
        """A session, and the first batch."""
        session = (await self.client.post("/v1/trainers", json={"durable_step": 0})).raise_for_status().json()
        self.headers = {TRAINER_EPOCH_HEADER: str(session["trainer_epoch"]), "Accept": MEDIA_TYPE}
        await self._lease()

    async def turn(self, keep: bool = True) -> None:
        """Report the step that is leased and wait for the next batch; the time that it took, unless it warms up."""
        began_s, used_s = time.perf_counter(), self.used_s
        (await self.client.post(f"/v1/trainers/steps/{self.step}", headers=self.headers)).raise_for_status()
        await self._lease()
        if keep:
            self.cpu_s.append(self.used_s - used_s)
            self.wall_s.append(time.perf_counter() - began_s)
        (await self.client.post(f"/v1/batches/{self.step - 1}/ack", headers=self.headers)).raise_for_status()

    @property
    def used_s(self) -> float:
        """CPU seconds of the process, its threads included, its children not."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def resident_bytes(self) -> int:
        """Memory of the process that is in RAM."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))

    async def _lease(self) -> None:
        self.step += 1
        while True:
            body = {"step": self.step, "wait_s": 30.0}
            answer = (await self.client.post("/v1/batches", json=body, headers=self.headers)).raise_for_status()
            if answer.status_code == 200:
                return


def _start(folder: Path, words: Sequence[str]) -> tuple[subprocess.Popen[bytes], int, Path]:
    folder.mkdir()
    make_tokenizer().save_pretrained(folder / "tokenizer")
    port, toml, log = _free_port(), folder / "run.toml", folder / "serve.log"
    slots = GROUPS * GROUP_SAMPLES
    toml.write_text(TOML.format(folder=folder, groups=GROUPS, samples=GROUP_SAMPLES, slots=slots, port=port))
    command = [sys.executable, "-m", "deploy.cli", "serve", str(toml), *words]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output), port, log


@asynccontextmanager
async def watched(folder: Path, name: str, words: Sequence[str]) -> AsyncGenerator[Watched]:
    """A service that is ready; it ends with the block."""
    process, port, log = _start(folder, words)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
            deadline_s = time.monotonic() + START_S
            while not await _is_ready(client):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError(f"the service did not start:\n{log.read_text(errors='replace')[-2000:]}")
                await asyncio.sleep(0.1)
            yield Watched(name, process, client)
    finally:
        process.kill()  # its Redis ends with it; nothing of the run is needed
        process.wait()


async def take_turns(services: Sequence[Watched], turns: int, keep: bool = True) -> None:
    """So many turns of each, one after the other; who begins changes from turn to turn."""
    for number in range(turns):
        for service in services if number % 2 else reversed(services):
            await service.turn(keep)


def cost_rows(services: Sequence[Watched]) -> list[dict[str, object]]:
    """CPU seconds for 1,000 samples of each service, over its turns. `against off`: median over pairs of turns."""
    per_thousand = 1000 / (GROUPS * GROUP_SAMPLES)
    base = next(s.cpu_s for s in services if s.name == BASELINE)
    return [
        {
            "service": s.name,
            "CPU s/1,000 samples": statistics.median(s.cpu_s) * per_thousand,
            "least": min(s.cpu_s) * per_thousand,
            "most": max(s.cpu_s) * per_thousand,
            "against off": statistics.median(mine / off for mine, off in zip(s.cpu_s, base, strict=True)),
            "wall s/step": statistics.median(s.wall_s),
            "turns": len(s.cpu_s),
        }
        for s in services
    ]


async def scrape_row(service: Watched, generation: str, repeats: int = 20) -> dict[str, object]:
    """Time and size of `/metrics` now: a scrape waits its turn among the tokens that stream in meanwhile."""
    took_s: list[float] = []
    text = ""
    for _ in range(repeats):
        began_s = time.perf_counter()
        text = (await service.client.get("/metrics")).raise_for_status().text
        took_s.append(time.perf_counter() - began_s)
    series = sum(not line.startswith("#") for line in text.splitlines())
    return {
        "rounds": service.step,
        "generation": generation,
        "median ms": statistics.median(took_s) * 1e3,
        "worst ms": max(took_s) * 1e3,
        "kB": len(text) / 1e3,
        "series": series,
    }


async def stream_rows(service: Watched, num_streams: int) -> list[dict[str, object]]:
    """Memory of the service with one event stream and with many, and events a second on one of them."""
    found: list[dict[str, object]] = []
    port, before = _port_of(service), service.resident_bytes
    async with contextlib.AsyncExitStack() as stack:
        counts = [0]
        for wanted in (1, num_streams):
            while len(counts) - 1 < wanted:
                counts.append(0)
                await stack.enter_async_context(_listening(port, counts, len(counts) - 1))
            used_s, start = service.used_s, counts[1]
            await asyncio.sleep(STREAM_S)
            found.append(
                {
                    "streams": wanted,
                    "MB more": (service.resident_bytes - before) / 1e6,
                    "events/s on one": (counts[1] - start) / STREAM_S,
                    "CPU share": (service.used_s - used_s) / STREAM_S,
                }
            )
    return found


@asynccontextmanager
async def _listening(port: int, counts: list[int], index: int) -> AsyncGenerator[None]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAccept: text/event-stream\r\n\r\n".encode())
    await writer.drain()

    async def count() -> None:
        while line := await reader.readline():
            counts[index] += line.startswith(b"event: status")

    counting = asyncio.create_task(count())
    try:
        yield
    finally:
        counting.cancel()
        await asyncio.gather(counting, return_exceptions=True)
        writer.close()


async def _scrape_for_ever(service: Watched) -> None:
    while True:
        await asyncio.sleep(SCRAPE_S)
        await service.client.get("/metrics")


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/readyz")).is_success
    except httpx.TransportError:
        return False


def _port_of(service: Watched) -> int:
    port = service.client.base_url.port
    assert port is not None, "the address has one"
    return port


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def measure(turns: int, num_streams: int, folder: Path) -> dict[str, list[dict[str, object]]]:
    """All tables, by name."""
    async with contextlib.AsyncExitStack() as stack:
        services = [
            await stack.enter_async_context(watched(folder / f"service-{number}", name, words))
            for number, (name, words) in enumerate(VARIANTS.items())
        ]
        for service in services:
            await service.open()
        await take_turns(services, WARM_UP_TURNS, keep=False)
        on = services[0]
        scrapes = [await scrape_row(on, "runs")]
        async with _watching(on):
            await take_turns(services, turns)
        scrapes.append(await scrape_row(on, "runs"))
        async with _paused(on):
            scrapes.append(await scrape_row(on, "is paused"))
        return {"cost": cost_rows(services), "scrape": scrapes, "streams": await stream_rows(on, num_streams)}


@asynccontextmanager
async def _paused(service: Watched) -> AsyncGenerator[None]:
    """Nothing is generated."""
    (await service.client.post("/v1/pause")).raise_for_status()
    await asyncio.sleep(PARK_S)
    try:
        yield
    finally:
        (await service.client.post("/v1/resume")).raise_for_status()


@asynccontextmanager
async def _watching(service: Watched) -> AsyncGenerator[None]:
    """A page is open, and Prometheus scrapes."""
    scraping = asyncio.create_task(_scrape_for_ever(service))
    try:
        async with _listening(_port_of(service), [0], 0):
            yield
    finally:
        scraping.cancel()
        await asyncio.gather(scraping, return_exceptions=True)


TITLES = {
    "cost": "CPU of the service for 1,000 samples",
    "scrape": "GET /metrics after few and after many rounds",
    "streams": "Event streams while samples run",
}


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the tables as JSON.")
@click.option("--turns", default=12, show_default=True, help="Steps of each service that are measured.")
@click.option("--streams", default=1000, show_default=True, help="Event streams that are open at once.")
def main(json_file: Path | None, turns: int, streams: int) -> None:
    """What watching costs."""
    with tempfile.TemporaryDirectory(prefix="april-watching-") as folder:
        tables = asyncio.run(measure(turns, streams, Path(folder)))
    for name, title in TITLES.items():
        report(title, tables[name], json_file.with_stem(f"{json_file.stem}-{name}") if json_file else None)


if __name__ == "__main__":
    main()
