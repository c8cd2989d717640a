"""The contract, as the user of `deploy/redis/users.acl`: each right is needed, and they are enough."""

import contextlib
import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from buffer.connection import open_link
from buffer.embedded import EmbeddedRedis, find_server
from buffer.keys import Keys
from buffer.redis_buffer import RedisBuffer
from buffer.scripts import Store
from buffer.transfer import export_run, import_run
from protocol.errors import RedisUnfitError
from tests.buffer import test_delivery, test_generation, test_groups, test_limits, test_services
from tests.buffer.helpers import Checked, Rig, redis_rig
from tests.buffer.test_patience import whole_run

ACL_FILE = Path(__file__).parents[2] / "deploy" / "redis" / "users.acl"
PASSWORD = "a password of the test"
LOGIN: dict[str, Any] = {"username": "april", "password": PASSWORD}

# Names a connection, which redis-py tries and does without; shortens a list that a short run does not fill.
UNSHOWN = {"+client|setinfo", "+client|setname", "+lpop"}

CONTRACT = [
    test_generation.test_a_sample_keeps_every_token_with_version_and_logprob,
    test_generation.test_the_same_call_again_changes_nothing,
    test_generation.test_parked_samples_resume_oldest_version_first_then_by_admission,
    test_generation.test_a_lease_that_expired_is_taken_over_and_the_older_attempt_fenced,
    test_groups.test_the_last_sample_makes_the_group_ready,
    test_groups.test_engine_failures_are_counted_once_an_attempt_and_end_the_sample,
    test_groups.test_drop_forgets_the_samples_and_keeps_the_reason,
    test_delivery.test_trained_frees_capacity_and_ack_consumes,
    test_delivery.test_a_rolled_back_trainer_replays_what_its_checkpoint_lacks,
    test_delivery.test_policies_are_numbered_and_one_is_active,
    test_services.test_a_superseded_service_changes_nothing,
    test_services.test_the_audit_record_keeps_order_and_is_bounded,
    test_limits.test_expired_leases_are_parked_with_what_was_checkpointed,
]


def rules() -> list[str]:
    (line,) = [line for line in ACL_FILE.read_text().splitlines() if line.startswith("user april ")]
    return line.split()[2:]


def set_user(server: EmbeddedRedis, rules: list[str]) -> None:
    with redis.Redis.from_url(server.url) as client:
        digest = hashlib.sha256(PASSWORD.encode()).hexdigest()
        client.execute_command("ACL", "SETUSER", "april", "reset", *rules, f"#{digest}")


@pytest.fixture(scope="module")
def acl_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        set_user(server, rules())
        yield server


@pytest.mark.parametrize("contract", CONTRACT, ids=lambda f: f.__name__)
async def test_the_contract_holds_for_the_smallest_user(
    acl_server: EmbeddedRedis, contract: Any, request: pytest.FixtureRequest
) -> None:
    inner = redis_rig(acl_server.url)  # looks at the raw keys as the administrator
    run = request.node.name.replace("[", "-").replace("]", "")

    async def connect(limits: Any = None) -> RedisBuffer:
        return await RedisBuffer.connect(acl_server.url, namespace="april", run=run, limits=limits, **LOGIN)

    def fingerprint() -> dict[Any, Any]:
        with redis.Redis.from_url(acl_server.url) as client:
            keys = sorted(client.scan_iter(match=f"{{april:{run}}}:*", count=1000))
            return {key: client.dump(key) for key in keys if not key.endswith(b":counters")}

    rig: Rig = replace(inner, connect=connect, fingerprint=fingerprint)
    buffer = Checked(await connect())
    assert buffer.inner.waits_for_aof
    await buffer.claim_service("first")
    names = contract.__code__.co_varnames[: contract.__code__.co_argcount]
    await contract(**{name: value for name, value in {"buffer": buffer, "rig": rig}.items() if name in names})
    await buffer.close()


def test_the_shipped_configuration_starts_and_lets_nobody_in_without_a_password(tmp_path: Path) -> None:
    shutil.copy(ACL_FILE, tmp_path)
    shutil.copy(ACL_FILE.with_name("redis.conf"), tmp_path)
    where = [f"--unixsocket {tmp_path}/redis.sock", "--port 0", "--maxmemory 100mb"]
    words = [word for line in where for word in line.split()]
    server = subprocess.Popen([str(find_server()), "redis.conf", *words], cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(unix_socket_path=f"{tmp_path}/redis.sock") as client:
            refused = None
            while refused is None and server.poll() is None:
                with contextlib.suppress(redis.ConnectionError):  # until it listens
                    try:
                        client.execute_command("PING")
                    except redis.AuthenticationError as error:
                        refused = error
        assert refused is not None
        with (
            redis.Redis(unix_socket_path=f"{tmp_path}/redis.sock", username="april", password="") as client,
            pytest.raises(redis.AuthenticationError),
        ):
            client.execute_command("PING")
    finally:
        server.terminate()
        server.wait()


async def test_export_and_import_need_what_the_readme_says(own_server: EmbeddedRedis, tmp_path: Path) -> None:
    more = re.findall(r"`((?:\+\w+ ?)+)`", ACL_FILE.with_name("README.md").read_text())[:2]
    set_user(own_server, [*rules(), *" ".join(more).split()])
    buffer = await RedisBuffer.connect(own_server.url, run="a", **LOGIN)
    await whole_run(buffer)
    await export_run(buffer.store, tmp_path / "run.jsonl")
    link = open_link(own_server.url, PASSWORD, "april", 4, False, Keys("april", "b"))
    await import_run(Store(link), tmp_path / "run.jsonl")
    await link.close()
    moved = await RedisBuffer.connect(own_server.url, run="b", **LOGIN)
    assert await moved.snapshot() == await buffer.snapshot()
    for each in (buffer, moved):
        await each.close()


def test_the_documented_step_gives_each_user_its_password(acl_server: EmbeddedRedis) -> None:
    """A digest put after `on`, as deploy/redis/README.md says, with whatever rules come after it."""
    digest = hashlib.sha256(PASSWORD.encode()).hexdigest()
    needs = {
        "april": ["PING", "HGET {april:run}:meta x"],
        "replica": ["PING", "REPLCONF listening-port 1", "PSYNC ? -1"],
        "sentinel": ["PING", "INFO", "ROLE", "REPLICAOF NO ONE", "CONFIG REWRITE", "MULTI", "EXEC", "SUBSCRIBE c",
                     "PUBLISH __sentinel__:hello x", "CLIENT KILL TYPE normal", "CLIENT SETNAME x", "SCRIPT KILL"],
    }  # fmt: skip
    lines = [line.split() for line in ACL_FILE.read_text().splitlines() if line]
    assert [line[1] for line in lines] == ["default", *needs]
    with redis.Redis.from_url(acl_server.url) as client:
        for _, user, on, *rest in lines[1:]:
            assert on == "on"
            name = f"{user}-of-the-test"
            client.execute_command("ACL", "SETUSER", name, on, f"#{digest}", *rest)
            for command in needs[user]:
                assert client.execute_command("ACL", "DRYRUN", name, *command.split()) in (b"OK", "OK"), command
            if user != "april":
                refused = client.execute_command("ACL", "DRYRUN", name, "HGET", "{april:run}:meta", "x")
                assert refused not in (b"OK", "OK"), "reads no run"
            with redis.Redis.from_url(acl_server.url, username=name, password=PASSWORD) as logged_in:
                assert logged_in.ping()


async def test_other_runs_are_out_of_reach(acl_server: EmbeddedRedis) -> None:
    with pytest.raises(RedisUnfitError):
        await RedisBuffer.connect(acl_server.url, namespace="other", run="r", **LOGIN)


@pytest.mark.parametrize("command", [rule for rule in rules() if rule.startswith("+") and rule not in UNSHOWN])
async def test_every_right_is_needed(own_server: EmbeddedRedis, command: str) -> None:
    set_user(own_server, [rule for rule in rules() if rule != command])

    async def everything() -> None:
        buffer = await RedisBuffer.connect(own_server.url, **LOGIN)
        try:
            await whole_run(buffer)
            await buffer.recount()
            await buffer.policies()
            assert buffer.waits_for_aof
        finally:
            await buffer.close()

    with pytest.raises((RedisUnfitError, AssertionError, redis.ResponseError)):
        await everything()
