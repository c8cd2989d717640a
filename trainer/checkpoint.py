"""Checkpoints of the trainer: DeepSpeed's state, random states, and one small JSON file that says what they are.

Always true: a checkpoint appears under its name whole and flushed to the disk, or not at all, and is never replaced, so
that a superseded trainer which wakes in the middle of a save can't take away what its successor has acknowledged; it is
the only thing that an acknowledgement rests on; a folder of its name without its state is put aside, never taken for
one; the newest is what a restart goes on from, on any number of ranks, or the one that is named; nothing of it is
loaded before all of its files are what they were when it was saved. Nothing in it comes from the network.
"""

import errno
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from protocol.errors import SettingsError, TrainingError
from protocol.settings import RunSettings
from trainer.best import BestCheckpoint
from trainer.checkpoint_files import damage, write_manifest
from trainer.distributed import Ranks
from trainer.identity import differences, identity
from trainer.summary import Totals

LOG = logging.getLogger("april.trainer")

STATE_NAME = "state.json"
NAME_PATTERN = re.compile(r"step-(\d{6,})")
FORMAT = 3
GLOB_CHARACTERS = frozenset("*?[")


class Saved(Protocol):
    """What a checkpoint holds besides the small things; see `ModuleEngine`."""

    def save(self, folder: Path) -> None:
        """Write its state under `folder`, in a place of its own."""
        ...

    def load(self, folder: Path, same_ranks: bool) -> None:
        """Read it, written by as many ranks or another number."""
        ...


class TrainerState(BaseModel):
    """`settings`: those that the checkpoint belongs to. `groups`: ids of the groups that each step since the previous
    checkpoint consumed. `extra`: numbers of other objects that training goes on from."""

    model_config = ConfigDict(extra="forbid")
    format: int = FORMAT
    settings: dict[str, Any]
    num_ranks: int
    step: int
    groups: dict[int, list[str]] = Field(default_factory=dict[int, list[str]])
    totals: Totals = Field(default_factory=Totals)
    extra: dict[str, dict[str, float]] = Field(default_factory=dict[str, dict[str, float]])


class Checkpoints:
    """The checkpoints of one run; every rank calls `save` and `restore` together."""

    def __init__(self, settings: RunSettings, ranks: Ranks) -> None:
        self._folder = settings.trainer_dir / "checkpoints"
        for path, settings_of_it in (
            (self._folder, "run.dir or trainer.default_local_dir"),
            (settings.trainer.resume_from_path, "trainer.resume_from_path"),
        ):
            if GLOB_CHARACTERS & set(str(path)):
                raise SettingsError(
                    f"the path {path} has one of the characters * ? [, and DeepSpeed reads those as patterns: "
                    f"set another {settings_of_it}"
                )
        self._kept = settings.trainer.num_checkpoints_kept
        self._chosen = settings.trainer.resume_from_path
        self._ranks = ranks
        self._seed = settings.run.seed
        self._identity = identity(settings)
        self.best = BestCheckpoint(self._folder)
        self._early: tuple[int, float] | None = None  # a result that was there before the checkpoint of its step

    def new_state(self) -> TrainerState:
        """The state of a run that has trained nothing."""
        return TrainerState(step=0, settings=self._identity, num_ranks=self._ranks.size)

    def restore(self, engines: Sequence[Saved]) -> TrainerState:
        """Load the newest checkpoint, or the one that is named, into `engines`; begin anew if there is none."""
        if self._ranks.is_main:
            self._drop_unfinished()
        if self._chosen and not (self._chosen / STATE_NAME).is_file():
            raise SettingsError(
                f"trainer.resume_from_path = {self._chosen} holds no checkpoint: name a folder such as "
                f"{self._folder / 'step-000020'}, or leave it out to go on from the newest"
            )
        newest = self._chosen or self._newest()
        found = self._ranks.share(newest and str(newest))
        if found is None:
            return self.new_state()
        folder = Path(found)
        state = self._read(folder / STATE_NAME)
        damaged = damage(folder, self._ranks)
        if damaged:
            raise TrainingError(f"the checkpoint in {folder} is damaged, {damaged}: {self._remedy(folder)}")
        self._check_identity(folder, state)
        same_ranks = state.num_ranks == self._ranks.size
        for engine in engines:
            engine.load(folder, same_ranks)
        if same_ranks:
            _set_random_state(folder / f"random-{self._ranks.rank}.safetensors")
        else:
            # States of other ranks would repeat or be missing; dropout does not ask for more than independence.
            torch.manual_seed(hash((self._seed, state.step, self._ranks.rank)))
        return state.model_copy(update={"settings": self._identity, "num_ranks": self._ranks.size})

    def save(self, engines: Sequence[Saved], state: TrainerState) -> Path:
        """Write `state` and what `engines` hold, then drop the oldest beyond the number that is kept."""
        final = self._folder / f"step-{state.step:06d}"
        partial = self._folder / self._ranks.share(f".{final.name}.{os.getpid()}.partial")
        with self._writing(state.step):
            self._write(engines, state, partial)
            if self._ranks.is_main:
                _flush(partial)
                self._place(partial, final)
                _flush_folder(self._folder)
                if self._early is not None and self._early[0] == state.step:
                    self.evaluated(*self._early)
                self._drop_old()
        self._ranks.barrier()
        return final

    def _write(self, engines: Sequence[Saved], state: TrainerState, partial: Path) -> None:
        if self._ranks.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self._ranks.barrier()
        try:
            for engine in engines:
                engine.save(partial)
            save_file(_random_state(), partial / f"random-{self._ranks.rank}.safetensors")
        except (RuntimeError, SafetensorError) as error:  # what torch and safetensors make of a disk that is full
            raise OSError(str(error)) from error
        self._ranks.barrier()
        if self._ranks.is_main:
            (partial / STATE_NAME).write_text(state.model_dump_json(indent=1))
        self._ranks.barrier()
        write_manifest(partial, self._ranks)

    @contextmanager
    def _writing(self, step: int) -> Generator[None]:
        """Say what to do where the disk is full, or refuses to be written."""
        try:
            yield
        except OSError as error:
            raise TrainingError(
                f"the checkpoint of step {step} can't be written to {self._folder} ({error}): free space there, or set "
                "trainer.default_local_dir, and start again from the last checkpoint"
            ) from error

    def _place(self, partial: Path, final: Path) -> None:
        """Give `partial` its name, unless a checkpoint has it."""
        if not (final / STATE_NAME).is_file():
            self.best.forget(_step_of(final.name))
        try:
            partial.replace(final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            if not (final / STATE_NAME).is_file():
                self._put_aside(final, f"no checkpoint, for {STATE_NAME} is not in it")
                partial.replace(final)
                return
            # Another trainer saved this step while this one was on its way to it: the two count the same groups.
            shutil.rmtree(partial)

    def put_newer_aside(self, step: int) -> None:
        """Rank 0, once the service has taken the session: checkpoints after `step` are of a history that is left."""
        self.best.forget_after(step)
        for folder in self._named():
            if _step_of(folder.name) > step:
                self._put_aside(folder, "of the history that is left")

    def _put_aside(self, folder: Path, why: str) -> None:
        names = (f"aside-{number}-{folder.name}" for number in itertools.count())
        aside = next(self._folder / name for name in names if not (self._folder / name).exists())
        folder.rename(aside)
        LOG.warning("%s is %s: it is %s now", folder.name, why, aside)

    def evaluated(self, step: int, reward: float) -> bool:
        """Rank 0: the weights after `step` have this held-out reward; says whether their checkpoint is the best now."""
        folder = self._folder / f"step-{step:06d}"
        saved = (folder / STATE_NAME).is_file()
        self._early = None if saved else (step, reward)
        is_best = self.best.evaluated(step, reward, folder if saved else None)
        if is_best:
            self._drop_old()  # the one that was the best until now
        return is_best

    def _named(self) -> list[Path]:
        """Everything that has the name of a checkpoint."""
        if not self._folder.is_dir():
            return []
        return [path for path in self._folder.iterdir() if NAME_PATTERN.fullmatch(path.name)]

    def _finished(self) -> list[Path]:
        return [path for path in self._named() if (path / STATE_NAME).is_file()]

    def _newest(self) -> Path | None:
        newest = max(self._finished(), key=lambda p: _step_of(p.name), default=None)
        after = _step_of(newest.name) if newest else -1
        skipped = sorted(path.name for path in self._named() if _step_of(path.name) > after)
        if skipped and self._ranks.is_main:
            LOG.warning(
                "%s in %s is no checkpoint, for %s is not in it: the run goes on from %s; to go on from there instead, "
                "stop it and put that file back from a copy",
                ", ".join(skipped),
                self._folder,
                STATE_NAME,
                newest.name if newest else "the start",
            )
        return newest

    def _remedy(self, folder: Path) -> str:
        copy = "put that file back from a copy"
        older = [p for p in self._finished() if p.name != folder.name]
        if not older:
            return f"{copy}, or begin anew with another run.name and run.dir"
        before = max(older, key=lambda p: _step_of(p.name))
        return (
            f"{copy}, or go back to step {_step_of(before.name)} with --trainer.resume_from_path={before} "
            "(docs/training.md says what that takes where later steps are acknowledged)"
        )

    def _drop_unfinished(self) -> None:
        for folder in self._folder.glob(".step-*.partial"):  # of saves, and of conversions to other ranks
            shutil.rmtree(folder, ignore_errors=True)

    def _drop_old(self) -> None:
        protected = self.best.protected_steps()
        for folder in sorted(self._finished(), key=lambda p: _step_of(p.name))[: -self._kept]:
            if _step_of(folder.name) not in protected:
                shutil.rmtree(folder)

    def _read(self, path: Path) -> TrainerState:
        try:
            raw = json.loads(path.read_bytes())
            if raw["format"] != FORMAT:
                raise TrainingError(
                    f"{path} has format {raw['format']}, this trainer reads {FORMAT}; use the one that wrote it"
                )
            state = TrainerState.model_validate(raw)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise TrainingError(f"{path} is not a trainer's state: {self._remedy(path.parent)}") from error
        return state

    def _check_identity(self, folder: Path, state: TrainerState) -> None:
        wrong = differences(state.settings, self._identity)
        if wrong:
            raise TrainingError(
                f"the checkpoint in {folder} belongs to other settings ({'; '.join(wrong)}): "
                "set them as they were, or name another run.dir"
            )


def _step_of(name: str) -> int:
    match = NAME_PATTERN.fullmatch(name)
    assert match, "only names of checkpoints come here"
    return int(match[1])


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
