"""What tests of whole trainings share: batches, settings with changes, a RUN.toml for other processes."""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from protocol.batch import Batch
from protocol.settings import RunSettings
from tests.trainer.factory import make_batch
from tests.trainer.fake_service import FakeService


def batch_of(step: int, _: int) -> Batch:
    """The batch of `step`, the same whenever it is asked for: written by the version before the one held."""
    return make_batch(step=step, version=max(0, step - 2))


def with_trainer(settings: RunSettings, **values: Any) -> RunSettings:
    return settings.model_copy(update={"trainer": settings.trainer.model_copy(update=values)})


def with_actor(settings: RunSettings, **values: Any) -> RunSettings:
    return settings.model_copy(update={"actor": settings.actor.model_copy(update=values)})


def published(service: FakeService, version: int) -> dict[str, torch.Tensor]:
    return load_file(Path(service.policies[version - 1]["path"]) / "model.safetensors")


def run_file(settings: RunSettings, folder: Path) -> Path:
    """The settings that differ from their defaults, as a TOML file."""
    lines = [
        "[run]", f'name = "test"\ndir = "{settings.run.dir}"',
        "[model]", f'path = "{settings.model.path}"',
        "[data]", "train_batch_size = 4", "[rollout]", "n = 4",
        "[actor]", "ppo_max_token_len_per_gpu = 256", "ppo_mini_batch_size = 2",
        "[actor.optim]", "lr = 1e-3",
        "[trainer]", f'service_url = "{settings.trainer.service_url}"', "save_freq = 2", 'logger = ["console"]',
    ]  # fmt: skip
    path = folder / "run.toml"
    path.write_text("\n".join(lines))
    return path


def environment() -> dict[str, str]:
    of_ranks = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    mine = {name: value for name, value in os.environ.items() if name not in of_ranks}
    return mine | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
