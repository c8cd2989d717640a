"""One master, one replica and three Sentinels: the master is killed, the buffer follows to the replica."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from buffer.embedded import EmbeddedRedis, find_server
from buffer.interface import CursorMove, NewGroup
from buffer.open import open_buffer
from buffer.redis_buffer import RedisBuffer
from protocol.errors import UnavailableError
from protocol.samples import Prompt
from protocol.settings import RunSettings
from tests.buffer.helpers import piece
from tests.buffer.test_cluster import free_ports

NUM_SENTINELS = 3
PATIENCE_S = 60.0
SENTINEL_CONF = """
port {port}
bind 127.0.0.1
dir {folder}
sentinel monitor april 127.0.0.1 {master} 2
sentinel down-after-milliseconds april 500
sentinel failover-timeout april 2000
"""


@dataclass
class Group:
    """The servers, by port."""

    folder: Path
    processes: dict[int, subprocess.Popen[bytes]]
    master: int
    replica: int
    sentinels: list[int]

    def kill(self, port: int) -> None:
        self.processes[port].kill()
        self.processes[port].wait()

    def start(self, port: int, *words: str) -> None:
        folder = self.folder / str(port)
        folder.mkdir(exist_ok=True)
        common = ("--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", "--appendonly", "yes")
        command = [str(find_server()), *common, "--repl-diskless-sync-delay", "0", *words]
        self.processes[port] = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def ask(self, port: int, *command: Any) -> Any:
        with redis.Redis(port=port, decode_responses=True) as client:
            return client.execute_command(*command)

    def settings(self, folder: Path, **sentinel: Any) -> RunSettings:
        nodes = [f"127.0.0.1:{port}" for port in self.sentinels]
        given = {"nodes": nodes, "master": "april"} | sentinel
        buffer = {"url": "redis://sentinels", "patience_s": PATIENCE_S, "sentinel": given}
        return RunSettings.model_validate({"run": {"dir": folder, "name": folder.name}, "buffer": buffer})


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(redis.RedisError):  # until it has started
            if condition():
                return
        time.sleep(0.02)
    raise AssertionError("not reached")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Group]:
    master, replica, *sentinels = free_ports(2 + NUM_SENTINELS)
    group = Group(tmp_path, {}, master, replica, sentinels)
    try:
        group.start(master)
        group.start(replica, "--replicaof", f"127.0.0.1 {master}")
        until(lambda: group.ask(replica, "INFO", "replication")["master_link_status"] == "up")
        for port in sentinels:
            folder = tmp_path / str(port)
            folder.mkdir()
            conf = folder / "sentinel.conf"
            conf.write_text(SENTINEL_CONF.format(port=port, folder=folder, master=master))
            group.processes[port] = subprocess.Popen(
                [str(find_server()), str(conf), "--sentinel"], stdout=subprocess.DEVNULL
            )
        until(lambda: all(knows_all(group, port) for port in sentinels))
        yield group
    finally:
        for process in group.processes.values():
            process.kill()
            process.wait()


def knows_all(group: Group, sentinel: int) -> bool:
    """Whether a Sentinel has found the replica and the other Sentinels, without which none is elected."""
    reply = group.ask(sentinel, "SENTINEL", "MASTERS")
    (state,) = reply.values() if isinstance(reply, dict) else reply
    others = int(state["num-other-sentinels"])
    return others == NUM_SENTINELS - 1 and int(state["num-slaves"]) == 1


@pytest.mark.slow
async def test_the_buffer_follows_the_master_to_the_replica(servers: Group, tmp_path: Path) -> None:
    buffer, _ = await open_buffer(servers.settings(tmp_path / "run", wait_replicas=1))
    try:
        await buffer.claim_service("one")
        prompts = [NewGroup(Prompt(f"p:{n}", (1, 2), "x", "p"), 1) for n in range(2)]
        first, _ = await buffer.admit(prompts, 0, CursorMove("", "2"))
        (lease,) = await buffer.start([first.samples[0].sample_id], "one", 60.0)
        await buffer.append(lease, piece(0, 8))
        epoch = (await buffer.open_trainer(0)).trainer_epoch
        await buffer.publish_policy(1, "weights/1", epoch)
        replicated = servers.ask(servers.master, "WAIT", 1, 5000)
        assert replicated == 1

        servers.kill(servers.master)
        await buffer.append(lease, piece(8, 8))  # waits for the election

        assert servers.ask(servers.replica, "ROLE")[0] == "master"
        (sample,) = await buffer.samples([lease.sample_id])
        assert sample.num_tokens == 16
        assert sample.tokens.tolist() == piece(0, 16).tokens.tolist()
        assert (await buffer.snapshot()).newest_version == 1
        assert (await buffer.recount()).faults == ()
    finally:
        await buffer.close()


@pytest.mark.slow
async def test_a_master_that_became_a_replica_is_left(servers: Group, tmp_path: Path) -> None:
    buffer, _ = await open_buffer(servers.settings(tmp_path / "run"))
    try:
        epoch = await buffer.claim_service("one")
        assert servers.ask(servers.master, "WAIT", 1, 5000) == 1
        until(lambda: servers.ask(servers.sentinels[0], "SENTINEL", "FAILOVER", "april") in (True, "OK"))
        until(lambda: servers.ask(servers.master, "ROLE")[0] == "slave")
        assert await buffer.claim_service("two") == epoch + 1
        assert servers.ask(servers.replica, "ROLE")[0] == "master"
    finally:
        await buffer.close()


@pytest.mark.slow
async def test_an_answer_waits_for_the_replica_that_it_was_promised_on(servers: Group, tmp_path: Path) -> None:
    buffer, _ = await open_buffer(servers.settings(tmp_path / "run", wait_replicas=1))
    try:
        await buffer.claim_service("one")
        epoch = (await buffer.open_trainer(0)).trainer_epoch
        await buffer.ack(0, epoch)
        servers.kill(servers.replica)
        with pytest.raises(UnavailableError, match="0 of 1 replicas had it in their AOF"):
            await buffer.impatient().ack(0, epoch)
    finally:
        await buffer.close()


async def test_a_master_without_enough_replicas_is_waited_for(own_server: EmbeddedRedis) -> None:
    buffer = await RedisBuffer.connect(own_server.url)
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("min-replicas-to-write", 1)
    with pytest.raises(UnavailableError, match="NOREPLICAS"):
        await buffer.claim_service("one")
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("min-replicas-to-write", 0)
    assert await buffer.claim_service("one") == 1
    await buffer.close()


async def test_sentinels_that_do_not_answer_are_a_redis_that_is_away(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    sentinel = {"nodes": [f"127.0.0.1:{port}"], "master": "april"}
    settings = RunSettings.model_validate({"buffer": {"url": "redis://sentinels", "sentinel": sentinel}})
    with pytest.raises(UnavailableError, match="No master found for 'april'"):
        await open_buffer(settings)


@pytest.mark.parametrize(
    ("buffer", "sentence"),
    [
        ({"sentinel": {"nodes": ["here"]}, "url": "redis://s"}, "is not HOST:PORT of a Sentinel"),
        ({"sentinel": {"nodes": ["a:1"]}}, "needs buffer.cluster = false and a redis:// or rediss:// buffer.url"),
        ({"sentinel": {"nodes": ["a:1"]}, "url": "redis://s", "cluster": True}, "needs buffer.cluster = false"),
        ({"sentinel": {"wait_replicas": 1}, "url": "redis://s"}, "wait_replicas needs buffer.sentinel.nodes"),
        ({"ssl_ca_certs": "ca.crt", "url": "redis://s"}, "need a rediss:// buffer.url"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(buffer: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        RunSettings.model_validate({"buffer": buffer})


def test_sentinel_addresses_may_be_names_and_ipv6() -> None:
    nodes = ["redis-0.local:26379", "[::1]:26380"]
    settings = RunSettings.model_validate({"buffer": {"url": "redis://s", "sentinel": {"nodes": nodes}}})
    assert settings.buffer.sentinel.addresses == (("redis-0.local", 26379), ("::1", 26380))
