"""Whole trainings beyond the plain one: adapters, a critic, schedules, the best checkpoint, several ranks."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from protocol.errors import SettingsError
from protocol.settings import RunSettings
from tests.trainer.fake_service import FakeService, serving
from tests.trainer.trainings import batch_of, environment, published, run_file, with_actor, with_trainer
from trainer.main import train

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.distributed.*is deprecated:FutureWarning"),
]


def test_the_best_checkpoint_is_pointed_to_and_outlives_pruning(service: FakeService, settings: RunSettings) -> None:
    train(with_trainer(settings, save_freq=1, test_freq=1, num_checkpoints_kept=1, total_training_steps=4))
    folder = settings.trainer_dir / "checkpoints"
    best = json.loads((folder / "best.json").read_text())
    # The fake service's reward grows with the version, so that the last evaluated step is the best.
    assert best["reward"] == 0.25 + 0.125 * best["step"]
    assert {p.name for p in folder.glob("step-*")} == {best["folder"], "step-000004"}


@pytest.mark.parametrize("zero_stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_adapters_with_a_kl_term_publish_whole_weights_and_resume(
    service: FakeService, settings: RunSettings, tiny_model_dir: Path, zero_stage: int
) -> None:
    model = settings.model.model_copy(update={"lora_rank": 4})
    zero = settings.deepspeed.model_copy(update={"zero_stage": zero_stage})
    lora = with_actor(settings, use_kl_loss=True, kl_loss_coef=0.1, ppo_mini_batch_size=2).model_copy(
        update={"model": model, "deepspeed": zero}
    )
    train(with_trainer(lora, total_training_steps=2))
    train(with_trainer(lora, total_training_steps=3))
    start, last = load_file(tiny_model_dir / "model.safetensors"), published(service, len(service.policies))
    assert {n: (w.shape, w.dtype) for n, w in last.items()} == {
        n: (w.shape, w.dtype) for n, w in start.items() if n != "lm_head.weight"
    }
    moved = {n for n in last if not torch.equal(last[n], start[n])}
    assert moved == {n for n in last if n.endswith("_proj.weight")}, "adapters sit beside linear layers alone"
    kl = [metrics["actor/kl_reference"] for _, metrics in service.metrics]
    assert kl[0] < kl[1] < kl[2], "the reference stays where the run began, also after a restart"


def test_ppo_trains_policy_and_critic_and_goes_on(service: FakeService, settings: RunSettings, tmp_path: Path) -> None:
    algorithm = settings.algorithm.model_copy(update={"adv_estimator": "gae"})
    ppo = with_trainer(settings.model_copy(update={"algorithm": algorithm}), critic_warmup=1)
    train(with_trainer(ppo, default_local_dir=tmp_path / "whole"))
    whole = [metrics["critic/vf_loss"] for _, metrics in service.metrics]
    assert service.events[1] == "trained 1", "the first step trains the critic alone, so nothing is published"
    with serving(FakeService(batch_of)) as second:
        parts = with_trainer(ppo, service_url=second.url)
        train(with_trainer(parts, total_training_steps=2))
        train(parts)
    assert [metrics["critic/vf_loss"] for _, metrics in second.metrics] == whole


def test_rates_follow_the_schedule_over_the_planned_steps(service: FakeService, settings: RunSettings) -> None:
    optim = settings.actor.optim.model_copy(update={"lr_scheduler_type": "linear", "lr_warmup_steps": 1})
    planned = with_trainer(settings, total_training_steps=None, total_epochs=1)  # 12 prompts, 4 in a batch
    train(with_actor(planned, optim=optim))
    assert [m["actor/lr"] for _, m in service.metrics] == pytest.approx([1e-3, 1e-3, 0.5e-3])


def test_sequence_parallelism_is_refused_here(service: FakeService, settings: RunSettings) -> None:
    with pytest.raises(SettingsError, match=r"ulysses_sequence_parallel_size = 2 .* set it to 1"):
        train(with_actor(settings, ulysses_sequence_parallel_size=2))
    assert not service.events, "before anything is loaded or asked for"


def command_of(launcher: str) -> list[str]:
    if launcher == "april":
        return ["-m", "deploy.cli", "train", "--nproc", "2"]
    return ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--module", "trainer"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["april", "deepspeed"])
def test_launchers_run_several_ranks_to_the_end(
    service: FakeService, settings: RunSettings, tmp_path: Path, launcher: str
) -> None:
    words = [str(run_file(settings, tmp_path)), "--trainer.total_training_steps=2", "--deepspeed.zero_stage=2"]
    command = [sys.executable, *command_of(launcher), *words]
    done = subprocess.run(
        command, env=environment() | {"DS_ACCELERATOR": "cpu"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert service.durable_step == 2


@pytest.mark.slow
def test_a_stop_reaches_all_ranks_and_they_save_first(
    service: FakeService, settings: RunSettings, tmp_path: Path
) -> None:
    words = [str(run_file(settings, tmp_path)), "--trainer.total_training_steps=1000", "--deepspeed.zero_stage=2"]
    process = subprocess.Popen(
        [sys.executable, *command_of("april"), *words],
        env=environment() | {"DS_ACCELERATOR": "cpu"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
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
    assert service.durable_step == service.trained_step < 1000
