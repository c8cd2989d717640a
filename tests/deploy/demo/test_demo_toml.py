"""The demo's RUN.toml: it is valid, and what it bounds fits the task."""

from importlib import import_module, resources
from pathlib import Path

import pytest

from protocol.settings import RunSettings, load_settings


@pytest.fixture(scope="module")
def settings() -> RunSettings:
    return load_settings(Path(str(resources.files("deploy.demo") / "demo.toml")))


def test_every_prompt_and_worked_solution_fits(settings: RunSettings) -> None:
    from deploy.demo.task import ChainSum

    longest = ChainSum((9,) * 30, ("-",) * 29, 9 - 29 * 9)
    assert len(longest.prompt) <= settings.data.max_prompt_length
    assert len(longest.solution()) + 1 <= settings.data.max_response_length


def test_source_and_reward_are_names_that_exist(settings: RunSettings) -> None:
    for name in (settings.data.source, settings.reward.name):
        module, _, function = (name or "").partition(":")
        assert callable(getattr(import_module(module), function))


def test_one_epoch_has_enough_prompts_for_all_steps(settings: RunSettings) -> None:
    steps = settings.trainer.total_training_steps
    assert steps is not None
    assert settings.data.num_train_prompts >= steps * settings.data.train_batch_size * settings.rollout.ratio


def test_it_over_provisions_and_looks_ahead(settings: RunSettings) -> None:
    assert (settings.rollout.ratio, settings.rollout.lookahead) == (2.0, 1)
    assert settings.trainer.val_before_train
