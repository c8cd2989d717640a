"""The live controller: its meter, its modes, its bounds, and what a service says of it."""

import logging
from types import SimpleNamespace

import pytest

from buffer.memory import MemoryBuffer
from protocol.messages import LiveSettings
from protocol.settings import RunSettings
from protocol.settings.rollout import AutotuneMode
from rollout_service.autotune import Autotune, RoundMeter
from rollout_service.control import Control
from rollout_service.events import Mailbox
from tests.support.service import running_service, service_settings


def test_the_meter_counts_idle_slots_only_while_a_batch_fills():
    meter = RoundMeter()
    assert meter.end(0, 4, 100) is None
    meter.saw(10.0, running=8, slots=8, filling=True)
    meter.saw(11.0, running=2, slots=8, filling=True)
    meter.saw(12.0, running=0, slots=8, filling=False)
    meter.saw(50.0, running=8, slots=8, filling=True)
    meter.saw(52.0, running=8, slots=8, filling=False)
    meter.started(50)
    measured = meter.end(6, 4, 550)
    assert measured is not None
    assert measured.bubble == pytest.approx(6 / 32)
    assert measured.reprefill == pytest.approx(50 / 500)
    assert measured.growth == pytest.approx(6 / 4)


def test_the_meter_starts_anew_each_round():
    meter = RoundMeter()
    meter.end(3, 4, 0)
    for now_s, running in ((0.0, 0), (1.0, 4)):
        meter.saw(now_s, running, 4, filling=True)
    first = meter.end(3, 4, 10)
    meter.saw(2.0, 4, 4, filling=True)
    second = meter.end(3, 4, 20)
    assert (first.bubble, second.bubble) == (1.0, 0.0)
    assert second.growth == 0


def tuned(tmp_path, mode: str, **rollout):
    settings = service_settings(
        tmp_path, rollout={"n": 2, "ratio": 1.0, "lookahead": 0, "autotune": mode, "max_lag": 4} | rollout
    )
    buffer = MemoryBuffer()
    control = Control(settings.rollout, buffer, Mailbox())
    return Autotune(settings, control), control, buffer


async def idle_rounds(autotune: Autotune, num_rounds: int) -> None:
    """Rounds in which half of the slots are idle."""
    snapshot = SimpleNamespace(ledger=SimpleNamespace(open=4, ready=0))
    for number in range(num_rounds):
        autotune.meter.saw(2.0 * number, 4, 8, filling=True)
        autotune.meter.saw(2.0 * number + 1, 4, 8, filling=False)
        await autotune.round_ended(snapshot, [SimpleNamespace(tokens_generated=1000 * number, num_preemptions=None)])


async def test_on_sets_the_ratio_within_bounds_with_its_reason_in_log_and_audit(tmp_path, caplog):
    autotune, control, buffer = tuned(tmp_path, "on", autotune_max_ratio=1.4)
    with caplog.at_level(logging.INFO):
        await idle_rounds(autotune, 40)
    assert control.ratio == 1.4
    assert "autotune sets the ratio to 1.25: 50% of slot time is idle" in caplog.text
    audit = await buffer.changes()
    assert [change.changes["ratio"] for change in audit] == [(1.0, 1.25), (1.25, 1.4)]
    assert audit[0].by.startswith("autotune: 50% of slot time is idle")
    status = autotune.status()
    assert (status.mode, status.ratio) == ("on", 1.4)
    assert "the largest ratio allowed" in (status.reason or "")
    assert status.measured["bubble"] == pytest.approx(0.5)


async def test_shadow_says_the_same_and_changes_nothing(tmp_path, caplog):
    autotune, control, buffer = tuned(tmp_path, "shadow")
    with caplog.at_level(logging.INFO):
        await idle_rounds(autotune, 20)
    assert control.ratio == 1.0
    assert not await buffer.changes()
    assert "autotune would set the ratio to 1.25" in caplog.text
    assert autotune.status().ratio == 1.25


async def test_off_is_silent(tmp_path):
    autotune, control, buffer = tuned(tmp_path, "off")
    await idle_rounds(autotune, 20)
    assert control.ratio == 1.0
    assert not await buffer.changes()
    assert autotune.status().reason is None


async def test_it_never_goes_where_max_lag_could_not_be_kept(tmp_path):
    autotune, control, _ = tuned(tmp_path, "on", max_lag=1, autotune_max_ratio=5.0)
    await idle_rounds(autotune, 80)
    assert control.ratio == 2.0


async def test_a_ratio_set_by_hand_is_where_it_goes_on_from(tmp_path):
    autotune, control, _ = tuned(tmp_path, "on", autotune_max_ratio=3.0)
    await idle_rounds(autotune, 6)
    await control.change(LiveSettings(ratio=2.0), "me")
    await idle_rounds(autotune, 30)
    assert control.ratio > 2.0


async def test_a_small_effective_sample_size_lowers_the_ratio(tmp_path):
    autotune, control, buffer = tuned(tmp_path, "on", ratio=2.0, autotune_min_ess=0.8)
    autotune.trainer_reported({"importance/ess": 0.4, "off_policy/token_share": 0.7})
    await idle_rounds(autotune, 12)
    assert control.ratio < 2.0
    assert "effective sample size is 0.40" in (await buffer.changes())[0].by


async def test_what_the_trainer_reports_no_more_is_not_known(tmp_path):
    autotune, control, _ = tuned(tmp_path, "on", ratio=3.0, autotune_min_ess=0.8)
    autotune.trainer_reported({"importance/ess": 0.2, "off_policy/token_share": 0.5})
    await idle_rounds(autotune, 5)
    assert control.ratio < 3.0
    assert autotune.status().measured["ess"] == pytest.approx(0.2)
    await idle_rounds(autotune, 200)
    assert {"ess", "off_policy"}.isdisjoint(autotune.status().measured)
    assert control.ratio > 2.4, "half of the slots are idle, and nothing is known to be against more"


async def test_a_metric_that_is_no_number_says_nothing(tmp_path):
    autotune, control, _ = tuned(tmp_path, "on", ratio=2.0, autotune_min_ess=0.8)
    for _ in range(12):
        autotune.trainer_reported({"importance/ess": float("nan")})
        autotune.trainer_reported({"importance/ess": 0.4})
        autotune.trainer_reported({"importance/ess": float("nan")})
        await idle_rounds(autotune, 1)
    assert autotune.status().measured["ess"] == pytest.approx(0.4)
    assert control.ratio < 2.0


def test_bounds_the_wrong_way_round_are_refused():
    with pytest.raises(ValueError, match="swap them"):
        RunSettings(rollout={"autotune_min_ratio": 2.0, "autotune_max_ratio": 1.5})


async def test_a_service_tunes_itself_and_shows_it(tmp_path):
    settings = service_settings(
        tmp_path,
        rollout={"n": 2, "ratio": 1.0, "lookahead": 0, "max_lag": 6, "autotune": "on"},
        engine={"simulated": {"median_tokens": 12, "sigma": 1.0, "step_base_s": 0.0005, "step_per_sequence_s": 0.0}},
    )
    async with running_service(settings) as service:
        headers = await service.open_trainer()
        for step in range(1, 16):
            await service.batch(step, headers)
            await service.client.post(
                "/v1/trainers/metrics", json={"step": step, "metrics": {"importance/ess": 0.9}}, headers=headers
            )
            await service.publish(step, headers)
        status = (await service.client.get("/v1/status")).json()
        view = (await service.client.get("/v1/settings")).json()
        assert status["autotune"]["mode"] == "on"
        assert status["autotune"]["measured"]["ess"] == pytest.approx(0.9)
        assert status["autotune"]["ratio"] == pytest.approx(view["ratio"])
        assert view["ratio"] > 1.0
        assert view["audit"][0]["by"].startswith("autotune: ")
        answer = await service.client.patch("/v1/settings", json={"autotune": "off"})
        assert answer.json()["autotune"] == AutotuneMode.OFF.value
        assert answer.json()["audit"][-1]["changes"] == {"autotune": ["on", "off"]}


def test_preemptions_are_counted_for_each_sample_that_a_round_started():
    meter = RoundMeter()
    meter.end(0, 4, 0, num_preemptions=10)
    meter.saw(0.0, running=8, slots=8, filling=True)
    for _ in range(20):
        meter.started(0)
    meter.saw(1.0, running=8, slots=8, filling=False)
    measured = meter.end(0, 4, 100, num_preemptions=15)
    assert measured is not None
    assert measured.preemptions == 0.25
