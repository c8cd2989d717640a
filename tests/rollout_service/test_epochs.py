"""A buffer that was emptied gives no epoch out again: who is left from before stays fenced."""

import json
from typing import Any

import pytest
import redis

from buffer.embedded import EmbeddedRedis
from buffer.epochs import Epochs
from protocol.errors import FencedError, SettingsError
from rollout_service.epochs import EpochFile
from rollout_service.failing import check_owner
from tests.buffer.helpers import Rig, leased_run, memory_rig, redis_rig


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory):
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


def test_values_in_the_file_never_sink(tmp_path):
    file = EpochFile(tmp_path)
    assert file.read() == Epochs(0, 0)
    file.raise_to(Epochs(service=3, trainer=0))
    file.raise_to(Epochs(service=0, trainer=2))
    file.raise_to(Epochs(service=1, trainer=1))
    assert EpochFile(tmp_path).read() == Epochs(3, 2)
    assert json.loads((tmp_path / "epochs.json").read_text()) == {"service": 3, "trainer": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["epochs.json"]


DAMAGED = ["{", "[]", '{"service": 1}', '{"service": null, "trainer": 1}']
NO_EPOCHS = ["-1", "1.5", "true", "Infinity", "1e300", "9" * 20]


@pytest.mark.parametrize("text", DAMAGED + [f'{{"service": {value}, "trainer": 1}}' for value in NO_EPOCHS])
def test_a_damaged_file_is_refused_before_anything_is_claimed(tmp_path, text):
    (tmp_path / "epochs.json").write_text(text)
    with pytest.raises(SettingsError, match="can't be read"):
        EpochFile(tmp_path).read()


def test_a_file_that_cannot_be_written_or_read_holds_nobody_up_and_is_named(tmp_path, caplog):
    EpochFile(tmp_path / "gone").raise_to(Epochs(1, 1))
    (tmp_path / "epochs.json").write_text("{")
    EpochFile(tmp_path).raise_to(Epochs(1, 1))
    assert [record.event for record in caplog.records] == ["epochs_not_kept"] * 2
    assert "epochs.json is not up to date" in caplog.text


async def test_what_was_deleted_while_the_service_ran_comes_back_whole(tmp_path):
    buffer: Any = await memory_rig().connect()
    service_epoch = await buffer.claim_service("first", {}, EpochFile(tmp_path))
    (tmp_path / "epochs.json").unlink()
    opened = await buffer.open_trainer(0)
    assert EpochFile(tmp_path).read() == Epochs(service_epoch, opened.trainer_epoch)


def _emptied(rig: Rig, url: str) -> Rig:
    """The same run after its buffer was emptied: nobody could tell it from a new one."""
    if rig.kind == "memory":
        return memory_rig()
    with redis.Redis.from_url(url) as client:
        client.flushall()
    return rig


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_epochs_begin_above_those_of_a_buffer_that_was_emptied(tmp_path, redis_server, kind):
    rig = memory_rig() if kind == "memory" else redis_rig(redis_server.url, "emptied")
    file = EpochFile(tmp_path)
    first: Any = await rig.connect()
    for _ in range(2):
        await first.claim_service("first", {}, file)
    old_trainer, _ = await leased_run(first, 1)
    assert file.read() == Epochs(service=2, trainer=old_trainer), "known before it is told"
    successor: Any = await _emptied(rig, redis_server.url).connect()
    assert await successor.claim_service("second", {}, file) == 3
    with pytest.raises(FencedError, match=f"trainer epoch {old_trainer} was superseded"):
        await successor.lease_batch(1, old_trainer, 1)
    new_trainer, _ = await leased_run(successor, 1)
    assert new_trainer > old_trainer
    for call in (successor.lease_batch(1, old_trainer, 1), successor.ack(1, old_trainer)):
        with pytest.raises(FencedError, match=f"superseded by epoch {new_trainer}"):
            await call
    assert file.read() == Epochs(3, new_trainer)
    if kind == "redis":
        with pytest.raises(FencedError):
            await first.offer(1)
    await first.close()
    await successor.close()


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_an_emptied_buffer_is_not_called_a_takeover(redis_server, kind):
    rig = memory_rig() if kind == "memory" else redis_rig(redis_server.url, "lost")
    buffer: Any = await rig.connect()
    await buffer.claim_service("first")
    trainer, _ = await leased_run(buffer, 1)
    if kind == "redis":
        _emptied(rig, redis_server.url)
    else:
        buffer.store.service_epoch = buffer.store.trainer_epoch = 0
    with pytest.raises(FencedError, match=r"service epoch 1 was not given out by this buffer.*emptied or set back"):
        await buffer.lease_batch(2, trainer, 1)
    with pytest.raises(FencedError, match=r"buffer of the run r was emptied or set back.*epoch is 0, ours 1.*gone"):
        check_owner(await buffer.snapshot(), 1, "r")
    successor: Any = await rig.connect()
    await successor.claim_service("second")
    with pytest.raises(FencedError, match=r"trainer epoch 7 was not given out by this buffer"):
        await successor.lease_batch(2, 7, 1)
    await buffer.close()
    await successor.close()
