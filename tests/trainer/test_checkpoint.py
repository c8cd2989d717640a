"""Checkpoints that two trainers of one run write: the one that was superseded takes nothing away."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainer.factory import make_settings
from trainer.checkpoint import Checkpoints


class OneRank:
    """`Ranks` of a trainer that is alone."""

    is_main, rank, size = True, 0, 1

    def share(self, value):
        return value

    def barrier(self) -> None: ...


class Engine:
    """Saves one file; `meanwhile` happens in the middle of it."""

    def __init__(self, weights: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._weights = weights
        self._meanwhile = meanwhile

    def save(self, folder: Path) -> None:
        (folder / "weights").write_text(self._weights)
        self._meanwhile()

    def load(self, folder: Path) -> None:
        self.loaded = (folder / "weights").read_text()


@pytest.fixture
def checkpoints(tmp_path) -> Checkpoints:
    return Checkpoints(make_settings(tmp_path, tmp_path), OneRank())


def at(checkpoints: Checkpoints, step: int):
    return checkpoints.new_state().model_copy(update={"step": step})


def test_a_superseded_trainer_that_wakes_in_a_save_leaves_its_successors_checkpoint(checkpoints):
    def successor() -> None:
        checkpoints.save(Engine("successor"), at(checkpoints, 4))

    checkpoints.save(Engine("first"), at(checkpoints, 2))
    # The successor is another process: it has another partial folder.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.getpid", lambda: 1)
        checkpoints.save(Engine("superseded", lambda: (patch.undo(), successor())), at(checkpoints, 4))
    engine = Engine("")
    assert checkpoints.restore(engine).step == 4
    assert engine.loaded == "successor"


def test_what_a_killed_trainer_left_unfinished_is_removed_and_not_restored(checkpoints, tmp_path):
    def killed() -> None:
        raise KeyboardInterrupt

    final = checkpoints.save(Engine("whole"), at(checkpoints, 2))
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(Engine("half", killed), at(checkpoints, 4))
    assert len(list(final.parent.iterdir())) == 2
    engine = Engine("")
    assert checkpoints.restore(engine).step == 2
    assert engine.loaded == "whole"
    assert list(final.parent.iterdir()) == [final]
    shutil.rmtree(final)
    assert checkpoints.restore(engine).step == 0
