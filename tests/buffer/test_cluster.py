"""Three real servers in Cluster mode: runs lie whole on one node each, and are followed when their slot moves."""

import asyncio
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from buffer.embedded import find_server
from buffer.keys import Keys
from buffer.redis_buffer import RedisBuffer
from protocol.errors import RedisUnfitError, SettingsError
from tests.buffer.helpers import admit, check, plain
from tests.buffer.test_patience import LONG_PATIENCE_S, whole_run

NUM_SLOTS = 16384
NUM_NODES = 3


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def start_node(folder: Path, port: int, bus_port: int) -> subprocess.Popen[bytes]:
    folder.mkdir()
    options = {"port": port, "cluster-port": bus_port, "bind": "127.0.0.1", "dir": folder, "save": ""}
    options |= {"cluster-enabled": "yes", "appendonly": "yes", "maxmemory-policy": "noeviction"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return subprocess.Popen([str(find_server()), *words], stdout=subprocess.DEVNULL)


def client(port: int) -> Any:
    return redis.Redis(port=port, decode_responses=True)


def answers(port: int) -> bool:
    with client(port) as node:
        try:
            return node.ping()
        except redis.ConnectionError:
            return False


def form_cluster(ports: list[int], bus_ports: list[int]) -> None:
    share = -(-NUM_SLOTS // len(ports))
    for index, port in enumerate(ports):
        while not answers(port):
            pass
        with client(port) as node:
            last = min(share * (index + 1), NUM_SLOTS) - 1
            node.execute_command("CLUSTER ADDSLOTSRANGE", share * index, last)
            node.execute_command("CLUSTER MEET", "127.0.0.1", ports[0], bus_ports[0])
    for port in ports:
        with client(port) as node:
            while node.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
                pass


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    folder = tmp_path_factory.mktemp("cluster")
    ports, bus_ports = free_ports(NUM_NODES), free_ports(NUM_NODES)
    nodes = [start_node(folder / str(port), port, bus) for port, bus in zip(ports, bus_ports, strict=True)]
    try:
        form_cluster(ports, bus_ports)
        yield ports
    finally:
        for node in nodes:
            node.terminate()
            node.wait()


def connect(port: int, **given: Any) -> Any:
    return RedisBuffer.connect(f"redis://127.0.0.1:{port}", cluster=True, **given)


@pytest.mark.slow
async def test_runs_lie_whole_on_one_node_and_spread_over_all(cluster: list[int]) -> None:
    outcomes: list[Any] = []
    for n in range(8):
        buffer = await connect(cluster[n % NUM_NODES], run=f"run{n}")
        assert buffer.waits_for_aof
        outcomes.append(plain(await whole_run(buffer)))
        await check(buffer)
        await buffer.close()
    assert all(outcome == outcomes[0] for outcome in outcomes)
    used = 0
    for n in range(8):
        holders = []
        for port in cluster:
            with client(port) as node:
                keys = list(node.scan_iter(match=Keys("april", f"run{n}").prefix + "*"))
                holders.append(len(keys))
                used |= bool(keys) << cluster.index(port)
        assert sum(count > 0 for count in holders) == 1
    assert used == 0b111


def move_slot(cluster: list[int], slot: int) -> None:
    """As `redis-cli --cluster reshard` does: migrate the slot's keys to another node, then tell everybody."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(client(port)) for port in cluster]
        names = [node.execute_command("CLUSTER MYID") for node in nodes]
        source = next(i for i, node in enumerate(nodes) if node.execute_command("CLUSTER COUNTKEYSINSLOT", slot))
        target = (source + 1) % len(nodes)
        nodes[target].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", names[source])
        nodes[source].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", names[target])
        while keys := nodes[source].execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
            nodes[source].execute_command("MIGRATE", "127.0.0.1", cluster[target], "", 0, 5000, "KEYS", *keys)
        for node in (nodes[target], nodes[source], *nodes):
            node.execute_command("CLUSTER SETSLOT", slot, "NODE", names[target])


@pytest.mark.slow
async def test_a_run_is_followed_to_another_node(cluster: list[int]) -> None:
    buffer = await connect(cluster[0], run="moving", patience_s=LONG_PATIENCE_S)
    await buffer.claim_service("first")
    await admit(buffer, 20)
    with client(cluster[0]) as node:
        slot = node.execute_command("CLUSTER KEYSLOT", Keys("april", "moving").prefix)

    async def keep_admitting() -> None:
        for _ in range(30):
            await admit(buffer, 1)

    await asyncio.gather(keep_admitting(), asyncio.to_thread(move_slot, cluster, slot))
    assert (await buffer.snapshot()).ledger.admitted == 50
    await check(buffer)
    await buffer.close()


@pytest.mark.slow
async def test_a_cluster_that_is_not_named_as_one_is_said(cluster: list[int]) -> None:
    async def connect_all() -> None:
        for n in range(8):  # some of these runs lie on another node
            await (await RedisBuffer.connect(f"redis://127.0.0.1:{cluster[0]}", run=f"alone{n}")).close()

    with pytest.raises(RedisUnfitError, match=r"buffer\.cluster = true"):
        await connect_all()


async def test_a_socket_is_no_cluster() -> None:
    with pytest.raises(SettingsError, match=r"buffer\.cluster"):
        await RedisBuffer.connect("unix:///nowhere.sock", cluster=True)
