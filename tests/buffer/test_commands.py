"""`april buffer`, and the file that moves a run."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner, Result

from buffer import transfer
from buffer.embedded import EmbeddedRedis
from buffer.open import open_buffer
from buffer.redis_buffer import RedisBuffer
from buffer.transfer import export_run, kind_of
from deploy.buffer_commands import buffer_group
from protocol.errors import ConflictError, DataError, RedisUnfitError, SettingsError
from protocol.messages import SettingsChange
from protocol.settings.run import RunSettings
from protocol.states import DropReason
from tests.buffer.helpers import admit, check, finish_group, leased_run, piece, plain, start_one
from tests.buffer.test_patience import whole_run
from tests.buffer.test_pool import pooled_run


async def busy_run(buffer: RedisBuffer) -> list[str]:
    """Groups in every state; the ids of those that are still there."""
    await buffer.claim_service("first")
    epoch, groups = await leased_run(buffer, 3)
    await buffer.record_spool(2, "abc")
    await buffer.ack(1, epoch)
    parked, dropped, ready = await admit(buffer, 3)
    await finish_group(buffer, ready)
    await buffer.drop(dropped.group_id, DropReason.FILTERED)
    await buffer.park(await start_one(buffer, parked.samples[0].sample_id), piece(0, 700, 3))
    await start_one(buffer, parked.samples[1].sample_id)
    await buffer.publish_policy(1, "w/1", epoch)
    await buffer.drop((await pooled_run(buffer))[0].group_id, DropReason.FILTERED)
    await buffer.record_change(SettingsChange(at=1.0, changes={"ratio": (1.0, 2.0)}, by="x"))
    return [group.group_id for group in (*groups[1:], parked, ready, dropped)]


async def everything(buffer: RedisBuffer, ids: list[str]) -> list[Any]:
    return [
        await buffer.snapshot(),
        await buffer.open_samples(),
        await buffer.open_groups(),
        await buffer.batch_leases(),
        await buffer.policies(),
        await buffer.changes(),
        plain(await buffer.groups(ids)),
    ]


@pytest.fixture
def run_toml(tmp_path: Path, own_server: EmbeddedRedis) -> Path:
    """A run on the embedded server of its own folder."""
    path = tmp_path / "run.toml"
    path.write_text(f'[run]\nname = "a"\ndir = "{tmp_path}"\n')
    return path


def on_buffer(run_toml: Path, use: Callable[[RedisBuffer], Any], name: str = "a") -> Any:
    async def work() -> Any:
        settings = RunSettings.model_validate({"run": {"name": name, "dir": run_toml.parent}})
        buffer, _ = await open_buffer(settings)
        try:
            return await use(buffer)
        finally:
            await buffer.close()

    return asyncio.run(work())


def april(*words: str | Path) -> Result:
    return CliRunner().invoke(buffer_group, [str(word) for word in words])


def stored(server: EmbeddedRedis) -> dict[bytes, bytes]:
    with redis.Redis.from_url(server.url) as client:
        return {key: client.dump(key) for key in client.scan_iter(count=1000)}


def test_looking_changes_nothing(run_toml: Path, own_server: EmbeddedRedis, tmp_path: Path) -> None:
    ids = on_buffer(run_toml, busy_run)
    before = stored(own_server)
    out = tmp_path / "out.json"
    assert april("stats", run_toml, "--json", out).exit_code == 0
    stats = json.loads(out.read_text())
    assert stats["groups"] == {
        "admitted": 7, "open": 1, "ready": 1, "leased": 2, "consumed": 1, "dropped": 2, "error": 0
    }  # fmt: skip
    assert stats["samples"]["parked"] == stats["samples"]["running"] == 1
    assert (stats["steps"]["leased"], stats["held"]["groups"], stats["dropped"]) == ([2, 3], 4, {"filtered": 2})
    assert (stats["pool"]["pooled"], stats["pool"]["error"], stats["samples"]["pooled"]) == (2, 0, 2)
    assert april("list", run_toml, "--json", out).exit_code == 0
    assert sorted(row["state"] for row in json.loads(out.read_text())) == ["leased", "leased", "open", "ready"]
    assert april("list", run_toml, "--state", "ready", "--json", out).exit_code == 0
    assert [row["group"] for row in json.loads(out.read_text())] == [ids[3]]
    shown = april("show", run_toml, f"{ids[2]}.000")
    assert [s["version"] for s in json.loads(shown.output)["segments"]] == [3]
    assert len(json.loads(shown.output)["segments"][0]["tokens"]) == 700
    assert json.loads(april("show", run_toml, ids[4]).output)["drop_reason"] == "filtered"
    assert json.loads(april("show", run_toml, "g000000006.003").output)["num_tokens"] == 6
    assert april("verify", run_toml).exit_code == 0
    assert stored(own_server) == before


def test_verify_ends_with_one_if_the_records_were_changed(
    run_toml: Path, own_server: EmbeddedRedis, tmp_path: Path
) -> None:
    on_buffer(run_toml, busy_run)
    out = tmp_path / "out.json"
    for name, field in (
        ("ledger", "open"),
        ("meta", "held_groups"),
        ("meta", "held_bytes"),
        ("meta", "pool_samples"),
        ("meta", "pool_bytes"),
        ("meta", "pool_continued"),
    ):
        with redis.Redis.from_url(own_server.url) as client:
            client.hincrby(f"{{april:a}}:{name}", field, 1)
            assert april("verify", run_toml, "--json", out).exit_code == 1
            assert any(field.partition("_")[2] in fault for fault in json.loads(out.read_text())["faults"])
            client.hincrby(f"{{april:a}}:{name}", field, -1)
    assert april("verify", run_toml).exit_code == 0


def test_a_run_that_is_not_there_is_not_made(run_toml: Path, own_server: EmbeddedRedis, tmp_path: Path) -> None:
    for words in (("stats",), ("list",), ("verify",), ("show", "g000000000"), ("export", tmp_path / "x")):
        result = april(words[0], run_toml, *words[1:])
        assert (result.exit_code, "there is no run a" in result.output) == (1, True)
    assert stored(own_server) == {}
    away = tmp_path / "away"
    assert "is not there" in april("stats", run_toml, f"--run.dir={away}").output
    assert not away.exists()


def test_a_run_moves_whole(run_toml: Path, own_server: EmbeddedRedis, tmp_path: Path) -> None:
    ids = on_buffer(run_toml, busy_run)
    before = on_buffer(run_toml, lambda buffer: everything(buffer, ids))
    file, again = tmp_path / "run.jsonl", tmp_path / "again.jsonl"
    assert april("export", run_toml, file).exit_code == 0
    with EmbeddedRedis(tmp_path / "other" / "redis"):
        moved = f"--run.dir={tmp_path / 'other'}"
        result = april("import", run_toml, file, moved)
        assert result.exit_code == 0, result.output
        assert april("verify", run_toml, moved).exit_code == 0
        assert april("export", run_toml, again, moved).exit_code == 0
        assert again.read_bytes() == file.read_bytes()
        other = tmp_path / "other" / "run.toml"
        assert on_buffer(other, lambda buffer: everything(buffer, ids)) == before

        async def go_on(buffer: RedisBuffer) -> None:
            assert await buffer.claim_service("second") == 2
            lease = await start_one(buffer, f"{ids[2]}.000")
            await buffer.append(lease, piece(700, 5, 4))
            await check(buffer)

        on_buffer(other, go_on)
        unchanged = stored(own_server)
        assert "already" in april("import", run_toml, file).output
        assert stored(own_server) == unchanged


def test_the_file_can_be_imported_under_another_name(run_toml: Path, own_server: EmbeddedRedis, tmp_path: Path) -> None:
    on_buffer(run_toml, whole_run)
    file = tmp_path / "run.jsonl"
    assert april("export", run_toml, file).exit_code == 0
    assert april("import", run_toml, file, "--run.name=b").exit_code == 0
    again = tmp_path / "again.jsonl"
    assert april("export", run_toml, again, "--run.name=b").exit_code == 0
    assert again.read_text().splitlines()[1:-1] == file.read_text().splitlines()[1:-1]
    assert on_buffer(run_toml, check, "b") is None


@pytest.mark.parametrize(
    ("old", "new"),
    [('"version": 1', '"version": 2'), ('"schema": 3', '"schema": 1'), ("april-buffer", "x"), ('"seq"', '"sea"')],
)
def test_a_file_that_is_not_understood_or_not_whole_is_refused(
    run_toml: Path, own_server: EmbeddedRedis, tmp_path: Path, old: str, new: str
) -> None:
    on_buffer(run_toml, busy_run)
    file = tmp_path / "run.jsonl"
    april("export", run_toml, file)
    text = file.read_text()
    assert old in text
    before = stored(own_server)
    for wrong in (text.replace(old, new, 1), text[: len(text) // 2], "\n".join(text.splitlines()[:-1]), "", "[1]"):
        file.write_text(wrong)
        result = april("import", run_toml, file, "--run.name=b")
        assert result.exit_code == DataError.exit_code, (wrong[:80], result.output, result.exception)
    assert stored(own_server) == before


def test_an_import_that_was_cut_short_is_closed_and_can_be_repeated(
    run_toml: Path, own_server: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = on_buffer(run_toml, busy_run)
    before = on_buffer(run_toml, lambda buffer: everything(buffer, ids))
    file = tmp_path / "run.jsonl"
    april("export", run_toml, file)
    with monkeypatch.context() as patch:

        async def fail(*_: Any) -> None:
            raise KeyError("killed")

        original = transfer._write
        left = [5]

        async def write(*args: Any) -> None:
            left[0] -= 1
            await (original if left[0] else fail)(*args)

        patch.setattr("buffer.transfer._write", write)
        assert isinstance(april("import", run_toml, file, "--run.name=b").exception, KeyError)
    with pytest.raises(RedisUnfitError, match="import"):
        on_buffer(run_toml, check, "b")
    assert april("import", run_toml, file, "--run.name=b").exit_code == 0
    assert on_buffer(run_toml, lambda buffer: everything(buffer, ids), "b") == before


async def test_a_run_that_changes_meanwhile_is_not_exported(own_server: EmbeddedRedis, tmp_path: Path) -> None:
    buffer = await RedisBuffer.connect(own_server.url)
    (group,) = await admit(buffer)
    lease = await start_one(buffer, group.samples[0].sample_id)
    read, start = buffer.store.read, [0]

    async def read_while_it_grows(*commands: Any) -> list[Any]:
        await buffer.append(lease, piece(start[0], 1))
        start[0] += 1
        return await read(*commands)

    buffer.store.read = read_while_it_grows  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ConflictError, match="drain"):
        await export_run(buffer.store, tmp_path / "run.jsonl")
    assert not await asyncio.to_thread(lambda: list(tmp_path.glob("run.jsonl*")))
    await buffer.close()


def test_a_key_that_no_run_has_is_refused() -> None:
    with pytest.raises(DataError):
        kind_of("x:1")


@pytest.mark.parametrize("key", ["meta", "ledger", "ready", "repeat_order", "parked", "pools", "g", "s", "t"])
def test_a_key_of_another_type_is_named_in_one_sentence(
    run_toml: Path, own_server: EmbeddedRedis, tmp_path: Path, key: str
) -> None:
    on_buffer(run_toml, busy_run)
    with redis.Redis.from_url(own_server.url) as client:
        name = next(k for k in sorted(client.keys()) if k.decode().split("}:")[1].split(":")[0] == key)
        kind = client.type(name).decode()
        client.delete(name)
        client.set(name, "not the buffer's")
    for words in (["stats"], ["list"], ["verify"], ["export"]):
        result = april(*words, run_toml, *([tmp_path / "run.jsonl"] if words == ["export"] else []))
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        if result.exit_code:
            assert f"{name.decode()} is no {kind}" in result.output
            assert result.output.count("\n") == 1
    assert result.exit_code == 2, "an export reads every key"

    async def write(buffer: RedisBuffer) -> None:
        await buffer.claim_service("second")

    if key in ("meta", "repeat_order"):
        with pytest.raises(DataError, match=f"is no {kind}"):
            on_buffer(run_toml, write)


def test_a_moved_run_keeps_its_identity(run_toml: Path, own_server: EmbeddedRedis, tmp_path: Path) -> None:
    async def claim(buffer: RedisBuffer, temperature: str = "1.0") -> int:
        return await buffer.claim_service("one", {"temperature": temperature})

    on_buffer(run_toml, claim)
    moved = "--run.name=moved"
    assert april("export", run_toml, tmp_path / "file").exit_code == 0
    assert april("import", run_toml, tmp_path / "file", moved).exit_code == 0

    async def moved_run(buffer: RedisBuffer) -> None:
        with pytest.raises(SettingsError, match="holds a run with temperature"):
            await claim(buffer, "0.5")
        assert await claim(buffer) == 2

    on_buffer(run_toml, moved_run, "moved")
