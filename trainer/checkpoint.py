"""Checkpoints of the trainer: DeepSpeed's state, random states, and one small JSON file that says what they are.

Always true: a checkpoint appears under its name whole and flushed to the disk, or not at all, and is never replaced, so
that a superseded trainer which wakes in the middle of a save can't take away what its successor has acknowledged; it is
the only thing that an acknowledgement rests on; the newest is what a restart goes on from. Nothing in it comes from the
network.
"""

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load_file, save_file

from protocol.errors import TrainingError
from protocol.settings import RunSettings
from trainer.distributed import Ranks
from trainer.engine import PolicyEngine
from trainer.summary import Totals

STATE_NAME = "state.json"
NAME_PATTERN = re.compile(r"step-(\d{6,})")
FORMAT = 1


class TrainerState(BaseModel):
    """`groups`: ids of the groups that each step since the previous checkpoint consumed."""

    model_config = ConfigDict(extra="forbid")
    format: int = FORMAT
    run: str
    model_path: str
    model_dtype: str
    zero_stage: int
    num_ranks: int
    step: int
    groups: dict[int, list[str]] = Field(default_factory=dict[int, list[str]])
    totals: Totals = Field(default_factory=Totals)


class Checkpoints:
    """The checkpoints of one run; every rank calls `save` and `restore` together."""

    def __init__(self, settings: RunSettings, ranks: Ranks) -> None:
        self._folder = settings.trainer_dir / "checkpoints"
        self._kept = settings.trainer.num_checkpoints_kept
        self._ranks = ranks
        self._identity: dict[str, Any] = {
            "run": settings.run.name,
            "model_path": str(settings.model.path),
            "model_dtype": settings.model.dtype,
            "zero_stage": settings.deepspeed.zero_stage,
            "num_ranks": ranks.size,
        }

    def new_state(self) -> TrainerState:
        """The state of a run that has trained nothing."""
        return TrainerState(step=0, **self._identity)

    def restore(self, engine: PolicyEngine) -> TrainerState:
        """Load the newest checkpoint into `engine`, or begin anew if there is none."""
        if self._ranks.is_main:
            self._drop_unfinished()
        newest = self._ranks.share(max((p.name for p in self._finished()), key=_step_of, default=None))
        if newest is None:
            return self.new_state()
        folder = self._folder / newest
        state = self._read(folder / STATE_NAME)
        engine.load(folder)
        _set_random_state(folder / f"random-{self._ranks.rank}.safetensors")
        return state

    def save(self, engine: PolicyEngine, state: TrainerState) -> Path:
        """Write `state` and what `engine` holds, then drop the oldest beyond the number that is kept."""
        final = self._folder / f"step-{state.step:06d}"
        partial = self._folder / self._ranks.share(f".{final.name}.{os.getpid()}.partial")
        if self._ranks.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self._ranks.barrier()
        engine.save(partial)
        save_file(_random_state(), partial / f"random-{self._ranks.rank}.safetensors")
        self._ranks.barrier()
        if self._ranks.is_main:
            (partial / STATE_NAME).write_text(state.model_dump_json(indent=1))
            _flush(partial)
            _rename_unless_there(partial, final)
            _flush_folder(self._folder)
            self._drop_old()
        self._ranks.barrier()
        return final

    def _finished(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return [p for p in self._folder.iterdir() if NAME_PATTERN.fullmatch(p.name) and (p / STATE_NAME).is_file()]

    def _drop_unfinished(self) -> None:
        for folder in self._folder.glob(".step-*.partial"):
            shutil.rmtree(folder, ignore_errors=True)

    def _drop_old(self) -> None:
        for folder in sorted(self._finished(), key=lambda p: _step_of(p.name))[: -self._kept]:
            shutil.rmtree(folder)

    def _read(self, path: Path) -> TrainerState:
        try:
            state = TrainerState.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise TrainingError(
                f"{path} is not a trainer state; remove that checkpoint to go on from an older"
            ) from error
        if state.format != FORMAT:
            raise TrainingError(
                f"{path} has format {state.format}, this trainer reads {FORMAT}; use the one that wrote it"
            )
        wrong = [
            f"{name} was {getattr(state, name)} and is {value}"
            for name, value in self._identity.items()
            if getattr(state, name) != value
        ]
        if wrong:
            raise TrainingError(
                f"the checkpoint in {path.parent} belongs to another run ({'; '.join(wrong)}): "
                "set them as they were, or name another run.dir"
            )
        return state


def _step_of(name: str) -> int:
    match = NAME_PATTERN.fullmatch(name)
    assert match, "only names of checkpoints come here"
    return int(match[1])


def _rename_unless_there(partial: Path, final: Path) -> None:
    try:
        partial.replace(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        # Another trainer saved this step while this one was on its way to it: the two count the same groups.
        shutil.rmtree(partial)


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(path: Path) -> None:
    state = load_file(path)
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _flush_folder(path)
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
