"""The whole trainer on DeepSpeed against a service over real HTTP."""

import json
import logging
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from protocol.batch import Batch
from protocol.errors import DataError, FencedError, SettingsError, TrainingError
from protocol.settings import RunSettings
from tests.trainer.factory import make_batch
from tests.trainer.fake_service import FakeService, serving
from tests.trainer.trainings import batch_of, environment, published, run_file, with_actor, with_trainer
from trainer import loop
from trainer.main import train

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning")


def test_trains_publishes_saves_and_acknowledges_in_order(service: FakeService, settings: RunSettings) -> None:
    summary = train(with_trainer(settings, val_before_train=True))
    assert service.events == [
        "open 0", "evaluate", "publish 1", "publish 2", "ack 2", "publish 3", "ack 3", "evaluate",
    ]  # fmt: skip
    assert [step for _, step in service.leases] == [1, 2, 3]
    assert summary.steps == 3
    assert summary.samples_trained == 48
    assert summary.groups_consumed == 12
    assert summary.eval_reward_before == 0.25
    assert summary.eval_reward_after == 0.625
    assert summary.samples_multi_version > 0
    assert summary.max_lag >= 1
    assert json.loads((settings.trainer_dir / "summary.json").read_text())["steps"] == 3
    steps = [json.loads(line) for line in (settings.trainer_dir / "metrics.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps if "reward/mean" in s] == [1, 2, 3]
    wanted = {"actor/grad_norm", "actor/entropy", "importance/ess", "lag/max", "timing_s/wait", "mismatch/lag0_mean"}
    assert wanted <= set(steps[1])
    assert [step for step, _ in service.metrics] == [1, 2, 3]


def test_published_weights_are_the_models_and_move(
    service: FakeService, settings: RunSettings, tiny_model_dir: Path
) -> None:
    train(settings)
    start, first, last = load_file(tiny_model_dir / "model.safetensors"), published(service, 1), published(service, 3)
    assert set(first) == set(start) - {"lm_head.weight"}
    assert all(first[name].shape == start[name].shape and first[name].dtype == start[name].dtype for name in first)
    assert any(not torch.equal(first[name], start[name]) for name in first)
    assert any(not torch.equal(first[name], last[name]) for name in first)


def test_goes_on_from_its_checkpoint_to_the_same_weights(
    service: FakeService, settings: RunSettings, tmp_path: Path
) -> None:
    train(with_trainer(settings, total_training_steps=4, default_local_dir=tmp_path / "whole"))
    whole = published(service, 4)
    with serving(FakeService(batch_of)) as second:
        parts = with_trainer(settings, service_url=second.url)
        train(with_trainer(parts, total_training_steps=2))
        summary = train(with_trainer(parts, total_training_steps=4))
    assert second.events[-5:] == ["open 2", "publish 2", "publish 3", "publish 4", "ack 4"]
    resumed = published(second, len(second.policies))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert summary.steps == 4
    assert summary.samples_trained == 64


def test_a_death_before_the_checkpoint_replays_the_same_steps(
    service: FakeService, settings: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Died(BaseException):
        pass

    def die(*_: object) -> None:
        raise Died

    longer = with_trainer(settings, total_training_steps=4)
    train(with_trainer(settings, total_training_steps=2))
    with monkeypatch.context() as patch:
        patch.setattr(loop.Checkpoints, "save", die)
        with pytest.raises(Died):
            train(longer)
    before = published(service, len(service.policies))
    assert service.durable_step == 2
    summary = train(longer)
    last_epoch = service.trainer_epoch
    assert [step for epoch, step in service.leases if epoch == last_epoch] == [3, 4]
    assert summary.steps == 4, "the steps that died count once"
    replayed = published(service, len(service.policies))
    assert all(torch.equal(before[name], replayed[name]) for name in before)


def test_one_update_has_ratio_one_and_several_have_not(service: FakeService, settings: RunSettings) -> None:
    train(with_trainer(settings, total_training_steps=1))
    several = {"ppo_mini_batch_size": 2, "ppo_epochs": 2, "use_kl_loss": True, "kl_loss_coef": 0.1}
    with serving(FakeService(batch_of)) as other:
        changed = with_trainer(settings, service_url=other.url, total_training_steps=2, logger=["tensorboard"])
        again = changed.model_copy(update={"run": changed.run.model_copy(update={"dir": settings.run_dir / "2"})})
        train(with_actor(again, **several))
    (_, single), (_, first), (_, second) = *service.metrics, *other.metrics
    assert single["actor/ppo_kl"] == single["actor/pg_clipfrac"] == single["actor/kl_reference"] == 0
    assert first["actor/ppo_kl"] != 0
    assert 0 < first["actor/kl_reference"] < second["actor/kl_reference"]
    # The weights p/b are those of the start of the batch, whatever came of π during it.
    assert first["importance/mean"] == pytest.approx(single["importance/mean"], rel=1e-5)
    assert list((again.trainer_dir / "tensorboard").glob("events.*"))


def test_a_newer_trainer_ends_this_one(service: FakeService, settings: RunSettings) -> None:
    def superseded(step: int, version: int) -> Batch:
        service.trainer_epoch += step == 2
        return batch_of(step, version)

    service.make_batch = superseded
    with pytest.raises(FencedError, match="superseded by 2"):
        train(settings)


def test_rides_out_a_service_that_is_away(service: FakeService, settings: RunSettings) -> None:
    service.away, service.not_ready = 3, 2
    assert train(settings).steps == 3


def test_a_failed_install_is_published_once_more(
    service: FakeService, settings: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.publish.CHECK_EVERY_S", 0.0)
    service.fail_installs = 1

    def waits_for_version_2(step: int, version: int) -> Batch:
        # As a service without lookahead: no batch before the weights of the step before are in the engine.
        service.not_ready = 10**6 if len(service.policies) < 1 else 0
        return batch_of(step, version)

    service.make_batch = waits_for_version_2
    release = threading.Thread(target=_release_after, args=(service, 2), daemon=True)
    release.start()
    summary = train(settings)
    assert service.events[1:3] == ["publish 1", "publish 1"]
    assert summary.publish_failures == 1
    assert summary.steps == 3


def _release_after(service: FakeService, num_policies: int) -> None:
    while len(service.policies) < num_policies:
        threading.Event().wait(0.01)
    service.not_ready = 0


def test_a_batch_that_is_not_finite_is_skipped_and_named(
    service: FakeService, settings: RunSettings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(step: int, version: int) -> Batch:
        batch = batch_of(step, version)
        if step == 2:
            batch.rewards[5] = float("nan")
        return batch

    service.make_batch = broken
    monkeypatch.setattr("trainer.main.set_up_messages", lambda _: None)
    monkeypatch.setattr(logging.getLogger("april.trainer"), "propagate", True)  # whoever ran before in this process
    with caplog.at_level("ERROR", "april.trainer"):
        summary = train(settings)
    assert "s2-g1/1" in caplog.text
    assert summary.nan_skips == 1
    assert service.events == ["open 0", "publish 1", "trained 2", "publish 3", "ack 3"]


def test_three_bad_steps_in_a_row_end_the_run(service: FakeService, settings: RunSettings) -> None:
    def broken(step: int, version: int) -> Batch:
        batch = batch_of(step, version)
        batch.rewards[0], batch.rewards[1] = float("inf"), float("-inf")
        return batch

    service.make_batch = broken
    with pytest.raises(TrainingError, match="3 steps in a row"):
        train(with_trainer(settings, total_training_steps=5, save_freq=1))
    assert not any(service.acks), "what may come of ruined weights is neither saved nor acknowledged"
    assert not list(settings.trainer_dir.glob("checkpoints/step-*"))


def test_refuses_what_does_not_belong_together(service: FakeService, settings: RunSettings) -> None:
    service.corrupt = True
    with pytest.raises(DataError, match="checksum"):
        train(settings)
    service.corrupt = False
    service.leased.clear()
    service.make_batch = lambda step, version: make_batch(step=step + 1)
    with pytest.raises(DataError, match="batch of step 2 for step 1"):
        train(settings)
    service.run = "another"
    with pytest.raises(SettingsError, match="'another'"):
        train(settings)


def test_a_checkpoint_of_another_run_is_refused(service: FakeService, settings: RunSettings) -> None:
    train(settings)
    other = settings.model_copy(update={"run": settings.run.model_copy(update={"name": "else"})})
    with pytest.raises(TrainingError, match=r"run\.name was test and is else"):
        train(other)


def test_sigterm_finishes_the_step_saves_and_exits_0(
    service: FakeService, settings: RunSettings, tmp_path: Path
) -> None:
    word = "--trainer.total_training_steps=1000"
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", str(run_file(settings, tmp_path)), word],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    seen = [json.loads(process.stdout.readline())["step"] for _ in range(3)]
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    while "asked to stop" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)  # asked twice, as many do: the save is not cut short
    process.communicate(timeout=120)
    assert seen == [1, 2, 3]
    assert process.returncode == 0
    last = service.trained_step
    assert service.durable_step == last < 1000
    assert service.events[-1] == f"ack {last}"


@pytest.mark.slow
def test_kill_9_in_the_middle_goes_on_from_the_checkpoint(
    service: FakeService, settings: RunSettings, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "trainer", str(run_file(settings, tmp_path)), "--trainer.total_training_steps=7"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while json.loads(process.stdout.readline())["step"] < 3:
        pass
    process.kill()
    process.communicate()
    durable = service.durable_step
    assert 2 <= durable < 7
    assert subprocess.run(command, env=environment(), capture_output=True, check=False).returncode == 0
    again = [step for epoch, step in service.leases if epoch == 2]
    assert again == list(range(durable + 1, 8))
    assert service.durable_step == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "dtype", "offload"),
    [
        (0, "bfloat16", False),
        (1, "float32", False),
        (2, "bfloat16", True),
        (3, "float32", False),
        (3, "bfloat16", True),
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.distributed.*is deprecated:FutureWarning")
def test_zero_stages_resume_to_the_same_weights(
    service: FakeService, settings: RunSettings, tmp_path: Path, stage: int, dtype: str, offload: bool
) -> None:
    zero = settings.deepspeed.model_copy(
        update={"zero_stage": stage, "offload_optimizer": offload, "offload_param": offload and stage == 3}
    )
    model = settings.model.model_copy(update={"dtype": dtype})
    settings = settings.model_copy(update={"deepspeed": zero, "model": model})
    train(with_trainer(settings, default_local_dir=tmp_path / "whole"))
    whole = published(service, 3)
    with serving(FakeService(batch_of)) as second:
        parts = with_trainer(settings, service_url=second.url)
        train(with_trainer(parts, total_training_steps=2))
        train(parts)
    resumed = published(second, len(second.policies))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert {str(w.dtype) for w in whole.values()} == {f"torch.{dtype}"}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_two_ranks_train_to_the_weights_of_one(
    service: FakeService, settings: RunSettings, tmp_path: Path, stage: int
) -> None:
    words = ["--trainer.total_training_steps=2", f"--deepspeed.zero_stage={stage}"]
    command = ["-m", "trainer", str(run_file(settings, tmp_path)), *words]
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = subprocess.run([sys.executable, *ranks, *command], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    two = published(service, 2)
    with serving(FakeService(batch_of)) as alone:
        one_settings = with_trainer(
            with_actor(settings, ppo_mini_batch_size=2),
            service_url=alone.url,
            total_training_steps=2,
            default_local_dir=tmp_path / "one",
        )
        train(one_settings)
        one = published(alone, 2)
    assert set(one) == set(two)
    # Adam's first steps divide a gradient by its own size: where that is rounding noise, lr is the error.
    differences = torch.cat([(one[name] - two[name]).abs().flatten() for name in one])
    assert differences.median() < 1e-6
    assert differences.mean() < 1e-5
