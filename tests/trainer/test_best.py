"""The pointer to the best checkpoint, and what pruning leaves alone."""

import shutil
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from tests.trainer.factory import make_settings
from tests.trainer.test_checkpoint import Engine, OneRank, at
from trainer.best import BestCheckpoint
from trainer.checkpoint import Checkpoints


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(make_settings(tmp_path, tmp_path, trainer={"num_checkpoints_kept": 1}), OneRank())


def steps_on_disk(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "trainer" / "checkpoints").iterdir())


def save(checkpoints: Checkpoints, step: int) -> Path:
    return checkpoints.save([Engine(str(step))], at(checkpoints, step))


def test_the_best_and_the_last_survive_pruning(checkpoints: Checkpoints, tmp_path: Path) -> None:
    for step, reward in ((1, 0.2), (2, 0.6), (3, 0.5), (4, 0.4)):
        save(checkpoints, step)
        assert checkpoints.evaluated(step, reward) == (step < 3)
    assert steps_on_disk(tmp_path) == ["best.json", "step-000002", "step-000004"]
    best = BestCheckpoint(tmp_path / "trainer" / "checkpoints").read()
    assert best is not None
    assert (best.step, best.reward, best.folder) == (2, 0.6, "step-000002")
    save(checkpoints, 5)
    assert checkpoints.evaluated(5, 0.7)
    save(checkpoints, 6)
    assert steps_on_disk(tmp_path) == ["best.json", "step-000005", "step-000006"], "the one it replaced goes"


def test_a_checkpoint_waits_for_its_evaluation(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoints.best.await_evaluation(1)
    for step in (1, 2, 3):
        save(checkpoints, step)
    assert steps_on_disk(tmp_path) == ["step-000001", "step-000003"]
    assert checkpoints.evaluated(1, 0.3)
    save(checkpoints, 4)
    assert steps_on_disk(tmp_path) == ["best.json", "step-000001", "step-000004"]


def test_evaluations_that_never_end_keep_few_checkpoints(checkpoints: Checkpoints, tmp_path: Path) -> None:
    for step in range(1, 9):
        checkpoints.best.await_evaluation(step)
        save(checkpoints, step)
    assert steps_on_disk(tmp_path) == ["step-000001", "step-000002", "step-000008"]


def test_a_step_without_a_checkpoint_is_never_the_best(checkpoints: Checkpoints) -> None:
    assert not checkpoints.evaluated(1, 0.9)
    save(checkpoints, 2)
    assert checkpoints.best.read() is None
    assert checkpoints.evaluated(2, 0.1)


def test_a_result_that_is_there_before_the_checkpoint_counts_once_it_is_saved(checkpoints: Checkpoints) -> None:
    assert not checkpoints.evaluated(3, 0.9)
    save(checkpoints, 3)
    best = checkpoints.best.read()
    assert best is not None
    assert (best.step, best.reward) == (3, 0.9)


def test_a_restart_knows_the_best_and_one_that_was_removed_counts_as_none(tmp_path: Path) -> None:
    def opened() -> Checkpoints:
        return Checkpoints(make_settings(tmp_path, tmp_path, trainer={"num_checkpoints_kept": 1}), OneRank())

    save(opened(), 1)
    assert opened().evaluated(1, 0.5)
    save(opened(), 2)
    assert not opened().evaluated(2, 0.4)
    assert opened().restore([Engine("")]).step == 2, "the last is gone on from, not the best"
    for path in (tmp_path / "trainer" / "checkpoints" / "step-000001").iterdir():
        path.unlink()
    (tmp_path / "trainer" / "checkpoints" / "step-000001").rmdir()
    assert opened().evaluated(2, 0.4)


def test_a_folder_that_deepspeed_would_misread_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"\[, and DeepSpeed"):
        Checkpoints(make_settings(tmp_path, tmp_path / "a[b"), OneRank())


def test_going_back_drops_a_pointer_to_what_is_left(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, tmp_path, trainer={"num_checkpoints_kept": 9})
    checkpoints = Checkpoints(settings, OneRank())
    for step in (1, 2, 3):
        save(checkpoints, step)
        checkpoints.evaluated(step, step / 10)
    checkpoints.put_newer_aside(2)
    assert checkpoints.best.read() is None
    save(checkpoints, 3)
    assert checkpoints.best.read() is None, "these are other weights"
    assert checkpoints.evaluated(3, 0.05)
    best = checkpoints.best.read()
    assert best is not None
    assert best.reward == 0.05


def test_going_back_keeps_a_pointer_to_what_stays(tmp_path: Path) -> None:
    checkpoints = Checkpoints(make_settings(tmp_path, tmp_path, trainer={"num_checkpoints_kept": 9}), OneRank())
    for step, reward in ((1, 0.5), (2, 0.4)):
        save(checkpoints, step)
        checkpoints.evaluated(step, reward)
    checkpoints.put_newer_aside(1)
    best = checkpoints.best.read()
    assert best is not None
    assert best.step == 1


def test_a_step_that_is_saved_anew_has_no_reward_yet(tmp_path: Path) -> None:
    checkpoints = Checkpoints(make_settings(tmp_path, tmp_path, trainer={"num_checkpoints_kept": 9}), OneRank())
    folder = save(checkpoints, 1)
    checkpoints.evaluated(1, 0.9)
    shutil.rmtree(folder)
    save(checkpoints, 1)
    assert checkpoints.best.read() is None
    save(checkpoints, 2)
    checkpoints.evaluated(2, 0.1)
    save(checkpoints, 2)
    assert checkpoints.best.read() is not None, "a save that finds the step done leaves it as it is"
