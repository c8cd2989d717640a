"""What the continuation buffer costs on a real Redis: time for each token, bytes, bandwidth, transitions.

- append: microseconds for each new token, with 1k, 8k and 64k tokens stored already; it should be flat;
- bytes in Redis for each token of parked samples, by MEMORY USAGE;
- park + resume of whole samples, as in a cut, as a share of the bandwidth of plain SET + GET of the same bytes, sent
  the same way and taken turn about;
- transitions a second with 1k, 10k (and 100k) groups in the buffer; it should be flat;
- memory of the service with up to 10k running samples (benchmarks/service_memory.py).
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import click
import numpy as np
from redis.asyncio import BlockingConnectionPool, Redis

from benchmarks.report import report
from benchmarks.service_memory import service_memory
from buffer.codec import BYTES_PER_TOKEN
from buffer.embedded import EmbeddedRedis
from buffer.interface import CursorMove, NewGroup
from buffer.redis_buffer import DEFAULT_MAX_CONNECTIONS, RedisBuffer
from protocol.samples import Prompt, Reward, Segment
from protocol.states import DropReason, FinishReason

LEASE_S = 3600.0
PIECE_TOKENS = 256  # what a sample writes between two checkpoints, at some 50 tokens a second
GROUP_SAMPLES = 4
ADMITTED_AT_ONCE = 250
APPENDS = 64  # of each length: 16k tokens
BANDWIDTH_TOKENS = 8192
CUT_SAMPLES = 64  # what one engine runs at once
REST_POLL_S = 0.1
CUTS = 15

Rows = list[dict[str, object]]


def segment(start: int, num_tokens: int) -> Segment:
    """Random tokens, as incompressible as real ones."""
    rng = np.random.default_rng(start)
    tokens = rng.integers(0, 151_936, num_tokens, dtype=np.int32)
    return Segment(start, 0, tokens, -rng.random(num_tokens, dtype=np.float32))


async def fill(buffer: RedisBuffer, num_groups: int) -> list[str]:
    """Admit groups after those that are there; the ids of their samples."""
    ids: list[str] = []
    while num_groups > 0:
        count = min(num_groups, ADMITTED_AT_ONCE)
        cursor = (await buffer.snapshot()).cursor
        after = str(int(cursor or 0) + count)
        new = [NewGroup(Prompt(f"p:{n}", tuple(range(200)), "x" * 600, "p"), GROUP_SAMPLES) for n in range(count)]
        groups = await buffer.admit(new, 0, CursorMove(cursor, after))
        ids += [sample.sample_id for group in groups for sample in group.samples]
        num_groups -= count
    return ids


async def timed(call: Callable[[], Awaitable[object]]) -> float:
    """Seconds that a call takes."""
    started = time.perf_counter()
    await call()
    return time.perf_counter() - started


async def append_times(buffer: RedisBuffer, lengths: list[int]) -> Rows:
    """Appends to samples of different lengths, turn about, so that the machine's moods hit all of them."""
    ids = (await fill(buffer, -(-len(lengths) // GROUP_SAMPLES)))[: len(lengths)]
    leases = await buffer.start(ids, "bench", LEASE_S)
    stored = dict.fromkeys(lengths, 0)
    for lease, length in zip(leases, lengths, strict=True):
        while stored[length] < length:
            await buffer.append(lease, segment(stored[length], 1024))
            stored[length] += 1024
    times: dict[int, list[float]] = {length: [] for length in lengths}
    for _ in range(APPENDS):
        for lease, length in zip(leases, lengths, strict=True):
            piece = segment(stored[length], PIECE_TOKENS)
            times[length].append(await timed(lambda lease=lease, piece=piece: buffer.append(lease, piece)))
            stored[length] += PIECE_TOKENS
    for lease in leases:
        await buffer.park(lease, None)
    return [
        {"tokens stored": length, "us/new token": statistics.median(seconds) / PIECE_TOKENS * 1e6}
        for length, seconds in times.items()
    ]


async def bytes_per_token(buffer: RedisBuffer, client: Redis, lengths: list[int]) -> Rows:
    """MEMORY USAGE of parked samples that grew by checkpoints of `PIECE_TOKENS`."""
    rows: Rows = []
    for length in lengths:
        (sample_id, *_) = await fill(buffer, 1)
        (lease,) = await buffer.start([sample_id], "bench", LEASE_S)
        for start in range(0, length, PIECE_TOKENS):
            await buffer.append(lease, segment(start, PIECE_TOKENS))
        await buffer.park(lease, None)
        used = int(
            await client.execute_command("MEMORY", "USAGE", buffer.store.keys.tokens(sample_id), "SAMPLES", 0) or 0
        )
        rows.append({"tokens stored": length, "bytes/token": used / length})
    return rows


async def bandwidth(buffer: RedisBuffer, client: Redis) -> Rows:
    """A cut and the resume after it: all samples parked at once, then started and read in one call each.

    Against SET of as many values at once and GET of all in one pipeline, over as many connections.
    """
    ids = await fill(buffer, CUT_SAMPLES // GROUP_SAMPLES)
    value = np.random.default_rng(0).bytes(BANDWIDTH_TOKENS * BYTES_PER_TOKEN)
    leases = await buffer.start(ids, "bench", LEASE_S)

    async def park_and_resume(start: int) -> None:
        nonlocal leases
        piece = segment(start, BANDWIDTH_TOKENS)
        await asyncio.gather(*(buffer.park(lease, piece) for lease in leases))
        leases = await buffer.start(ids, "bench", LEASE_S)
        await buffer.samples(ids)

    async def set_and_get(start: int) -> None:
        names = [f"plain:{start}:{sample_id}" for sample_id in ids]
        await asyncio.gather(*(client.execute_command("SET", name, value) for name in names))
        pipeline = client.pipeline(transaction=True)
        for name in names:
            pipeline.execute_command("GET", name)
        await pipeline.execute()

    ours: list[float] = []
    plain: list[float] = []
    for _ in range(CUTS):
        ours.append(await timed(lambda: park_and_resume(0)))
        plain.append(await timed(lambda: set_and_get(0)))
        for group_id in dict.fromkeys(i.partition(".")[0] for i in ids):
            await buffer.drop(group_id, DropReason.OPERATOR)
        ids = await fill(buffer, CUT_SAMPLES // GROUP_SAMPLES)
        leases = await buffer.start(ids, "bench", LEASE_S)
    megabytes = 2 * len(value) * CUT_SAMPLES / 1e6
    ours_s, plain_s = statistics.median(ours), statistics.median(plain)
    return [
        {"what": "park + resume", "MB/s": megabytes / ours_s, "ratio": plain_s / ours_s},
        {"what": "SET + GET", "MB/s": megabytes / plain_s, "ratio": 1.0},
    ]


async def carry(buffer: RedisBuffer, sample_ids: list[str]) -> int:
    """Samples from QUEUED to SCORED over a park; the number of transitions."""
    for sample_id in sample_ids:
        (lease,) = await buffer.start([sample_id], "bench", LEASE_S)
        await buffer.append(lease, segment(0, 16))
        await buffer.park(lease, segment(16, 16))
        (lease,) = await buffer.start([sample_id], "bench", LEASE_S)
        await buffer.finish(lease, segment(32, 16), FinishReason.STOP)
        await buffer.score(sample_id, Reward(1.0), 1)
    return 6 * len(sample_ids)


async def at_rest(client: Redis) -> None:
    """Return when the server doesn't rewrite its AOF any more, which filling it makes it do."""
    while True:
        if not (await client.info("persistence"))["aof_rewrite_in_progress"]:
            return
        await asyncio.sleep(REST_POLL_S)


async def transition_rates(buffer: RedisBuffer, client: Redis, sizes: list[int], num_samples: int) -> Rows:
    """Whole lives of samples, while more and more groups lie in the buffer."""
    rows: Rows = []
    for size in sizes:
        held = (await buffer.snapshot()).held_groups
        await fill(buffer, size - held)
        await at_rest(client)
        rates: list[float] = []
        for _ in range(5):
            ids = await fill(buffer, -(-num_samples // GROUP_SAMPLES))
            started = time.perf_counter()
            count = await carry(buffer, ids)
            rates.append(count / (time.perf_counter() - started))
            for group_id in dict.fromkeys(i.partition(".")[0] for i in ids):
                await buffer.drop(group_id, DropReason.OPERATOR)
        rows.append({"groups in the buffer": size, "transitions/s": statistics.median(rates)})
    return rows


async def measure(url: str, largest: int, num_samples: int) -> dict[str, Rows]:
    """All tables of the buffer."""
    buffer = await RedisBuffer.connect(url, run="benchmark")
    pool = BlockingConnectionPool.from_url(url, protocol=2, max_connections=DEFAULT_MAX_CONNECTIONS)
    client = Redis(connection_pool=pool)
    try:
        await buffer.claim_service("benchmark")
        lengths = [1024, 8192, 65_536]
        tables = {
            "Append": await append_times(buffer, lengths),
            "Memory": await bytes_per_token(buffer, client, lengths),
            "Bandwidth": await bandwidth(buffer, client),
            "Transitions": await transition_rates(
                buffer, client, [s for s in (1_000, 10_000, 100_000) if s <= largest], num_samples
            ),
        }
    finally:
        await buffer.close()
        await client.aclose(close_connection_pool=True)
    return tables


def show(tables: dict[str, Rows], json_file: Path | None) -> None:
    """Print the tables, and write each to a file of its own."""
    for title, rows in tables.items():
        part = json_file.with_stem(f"{json_file.stem}-{title.lower()}") if json_file else None
        report(title, rows, part)


@click.command()
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    help="Write the tables as JSON: NAME-append and so on.",
)
@click.option("--groups", default=10_000, show_default=True, help="Most groups in the buffer; 100000 takes minutes.")
@click.option("--samples", default=64, show_default=True, help="Samples of one measured run of transitions.")
@click.option("--running", default=10_000, show_default=True, help="Most samples that run at once in a service.")
def main(json_file: Path | None, groups: int, samples: int, running: int) -> None:
    """Time the buffer on a redis-server of its own (AOF synced at every write), then weigh a service that uses one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with EmbeddedRedis(folder / "redis") as server:
            tables = asyncio.run(measure(server.url, groups, samples))
        counts = [count for count in (100, 1_000, 10_000) if count <= running]
        if counts:
            tables["Service"] = service_memory(folder, counts)
    show(tables, json_file)


if __name__ == "__main__":
    main()
