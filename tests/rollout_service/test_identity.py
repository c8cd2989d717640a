"""A run is not continued with another model, wherever it is kept."""

import pytest

from buffer.embedded import EmbeddedRedis
from protocol.errors import SettingsError
from protocol.states import GroupState
from rollout_service.identity import check_identity, claim_folder, identity_of, warn_of_longer
from tests.buffer.helpers import admit, finish_group, leased_run, memory_rig, piece, redis_rig, start_one
from tests.buffer.test_pool import pooled_run
from tests.support.service import service_settings

OTHERS = [({"model": {"path": "/other"}}, "model.path"), ({"rollout": {"temperature": 0.5}}, "rollout.temperature")]


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory):
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


def test_the_same_run_goes_on_and_other_settings_may_change(tmp_path):
    claim_folder(service_settings(tmp_path))
    check_identity(service_settings(tmp_path, rollout={"ratio": 1.5, "n": 4}))


def test_a_service_that_never_started_leaves_the_folder_to_the_next(tmp_path):
    check_identity(service_settings(tmp_path, model={"path": "/wrong"}))
    check_identity(service_settings(tmp_path))


@pytest.mark.parametrize(("changes", "name"), OTHERS)
def test_another_model_or_temperature_is_refused(tmp_path, changes, name):
    claim_folder(service_settings(tmp_path))
    with pytest.raises(SettingsError, match=name):
        check_identity(service_settings(tmp_path, **changes))


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(SettingsError, match="can't be read"):
        check_identity(service_settings(tmp_path))


async def test_the_buffer_keeps_it_too_and_refuses_another_run(tmp_path, redis_server):
    for rig in (memory_rig(), redis_rig(redis_server.url)):
        first, second, third = [await rig.connect() for _ in range(3)]
        await first.claim_service("before there was an identity")
        assert await second.claim_service("one", identity_of(service_settings(tmp_path))) == 2
        for changes, name in OTHERS:
            with pytest.raises(SettingsError, match=f"holds a run with {name} = .* and this one has"):
                await third.claim_service("two", identity_of(service_settings(tmp_path, **changes)))
        assert (await second.snapshot()).service_epoch == 2, "who is refused takes nothing over"
        assert await second.offer(1) is False
        other = service_settings(tmp_path, rollout={"ratio": 1.5})
        assert await third.claim_service("two", identity_of(other)) == 3
        for buffer in (first, second, third):
            await buffer.close()


async def test_samples_that_are_longer_than_a_lowered_limit_are_counted(tmp_path, redis_server, caplog):
    for rig in (memory_rig(), redis_rig(redis_server.url)):
        caplog.clear()
        buffer = await rig.connect()
        await buffer.claim_service("one")
        _, groups = await leased_run(buffer, 1)
        _, ready = await admit(buffer, 2)
        assert await finish_group(buffer, ready, num_tokens=9) is GroupState.READY
        open_group, pooled = (await admit(buffer))[0], (await pooled_run(buffer))[0]
        await buffer.park(await start_one(buffer, open_group.samples[0].sample_id), piece(0, 8))
        longer = [s for g in [ready, open_group] for s in (await buffer.groups([g.group_id]))[0].samples]
        expected = sum(s.num_tokens > 7 for s in longer)
        assert expected == 3
        assert len(groups[0].samples) == 2, "what is leased has been cut to its batch"
        assert pooled.samples
        await warn_of_longer(buffer, 7)
        assert f"{expected} samples in the buffer are longer than data.max_response_length = 7" in caplog.text
        caplog.clear()
        await warn_of_longer(buffer, 64)
        assert not caplog.text
        await buffer.close()
