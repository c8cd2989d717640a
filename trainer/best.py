"""The best checkpoint by evaluation reward: a pointer beside the checkpoints.

Always true: the pointer is replaced whole; it names a checkpoint that was on the disk when it was written and that
pruning leaves alone; the reward it gives is of exactly that step's weights, so it goes before other weights can come
under that name. A pointer to a folder that somebody has removed counts as none.
"""

import logging
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

LOG = logging.getLogger("april.trainer")

POINTER_NAME = "best.json"
MAX_AWAITED = 2  # evaluations that never end must not keep every checkpoint


class Best(BaseModel):
    """Content of the pointer; `folder` lies beside it."""

    model_config = ConfigDict(extra="forbid")
    step: int
    reward: float
    folder: str


class BestCheckpoint:
    """Rank 0's; `folder` is where the checkpoints are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._awaited: set[int] = set()

    def read(self) -> Best | None:
        """What the pointer says, if there is one."""
        best = self._written()
        return best if best and (self._folder / best.folder).is_dir() else None

    def forget(self, step: int) -> None:
        """The checkpoint of `step` is about to be saved anew: what was evaluated before is not of its weights."""
        best = self._written()
        if best and best.step == step:
            self._drop(best)

    def forget_after(self, step: int) -> None:
        """Later steps are of a history that is left."""
        best = self._written()
        if best and best.step > step:
            self._drop(best)

    def await_evaluation(self, step: int) -> None:
        """An evaluation of `step` was asked for: its checkpoint, if there is one, stays until a result is there."""
        if len(self._awaited) < MAX_AWAITED:
            self._awaited.add(step)

    def evaluated(self, step: int, reward: float, checkpoint: Path | None) -> bool:
        """Take note of a result; says whether `checkpoint`, that step's, is the best now."""
        self._awaited = {later for later in self._awaited if later > step}
        best = self.read()
        if checkpoint is None or (best is not None and reward <= best.reward):
            return False
        partial = self._folder / f".{POINTER_NAME}.partial"
        with partial.open("w") as file:
            file.write(Best(step=step, reward=reward, folder=checkpoint.name).model_dump_json(indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._folder / POINTER_NAME)
        return True

    def protected_steps(self) -> set[int]:
        """Steps whose checkpoints pruning must leave alone."""
        best = self.read()
        return self._awaited | ({best.step} if best else set())

    def _drop(self, best: Best) -> None:
        (self._folder / POINTER_NAME).unlink(missing_ok=True)
        LOG.info("%s named %s of before and is gone: the next evaluation writes it anew", POINTER_NAME, best.folder)

    def _written(self) -> Best | None:
        """The pointer as it is, whether or not its folder is there."""
        try:
            return Best.model_validate_json((self._folder / POINTER_NAME).read_bytes())
        except (OSError, ValidationError):
            return None
