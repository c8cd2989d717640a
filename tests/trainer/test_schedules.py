"""Learning rates: warm-up, curves, and what is true at both ends."""

import pytest

from protocol.settings.trainer import LrScheduler, OptimSettings
from trainer.schedules import learning_rate


def rates(total: int, **values: object) -> list[float]:
    optim = OptimSettings.model_validate({"lr": 1.0} | values)
    return [learning_rate(optim, step, total) for step in range(1, total + 1)]


def test_without_settings_the_rate_is_the_rate() -> None:
    assert rates(3) == [1.0, 1.0, 1.0]


def test_warm_up_is_linear_and_starts_above_zero() -> None:
    assert rates(6, lr_warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(10, lr_warmup_steps_ratio=0.4) == rates(10, lr_warmup_steps=4)


def test_linear_falls_by_equal_amounts_to_above_the_floor() -> None:
    assert rates(4, lr_scheduler_type="linear") == [1.0, 0.75, 0.5, 0.25]
    assert rates(4, lr_scheduler_type="linear", min_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert rates(5, lr_scheduler_type="linear", lr_warmup_steps=1) == [1.0, 1.0, 0.75, 0.5, 0.25]


def test_cosine_is_half_way_in_the_middle() -> None:
    curve = rates(8, lr_scheduler_type="cosine", min_lr_ratio=0.1)
    assert curve[0] == 1.0
    assert curve[4] == pytest.approx(0.55)
    assert curve == sorted(curve, reverse=True)
    assert 0.1 < curve[-1] < 0.2


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("total", [1, 2, 7])
def test_no_step_is_trained_for_nothing(kind: LrScheduler, total: int) -> None:
    assert all(0 < rate <= 1 for rate in rates(total, lr_scheduler_type=kind, lr_warmup_steps_ratio=0.3))
    optim = OptimSettings(lr=1.0, lr_scheduler_type=kind)
    assert learning_rate(optim, total + 5, total) == learning_rate(optim, total, total) > 0


def test_a_warm_up_longer_than_the_run_only_warms_up() -> None:
    assert rates(2, lr_warmup_steps=4, lr_scheduler_type="cosine") == [0.25, 0.5]
