"""Loading weights into a running vLLM engine, and knowing which are in it.

Always true:
- `active` names the weights that the engine computes with; it changes only after they are loaded, checked on every
  worker, and the prefix cache of the old ones is gone;
- a folder is verified whole (checksums, tensor names, shapes) before the engine is touched.
"""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import EngineError, WeightsError
from protocol.manifest import verify_manifest
from rollout_service.engines.checkpoint import (
    Shapes,
    check_published,
    checkpoint_files,
    checkpoint_shapes,
    read_config,
    ties_embeddings,
)
from rollout_service.engines.vllm_process import VllmProcess

PREFIX_RESET_TRIES = 50  # the core frees the blocks of aborted requests within a step or two
PREFIX_RESET_WAIT_S = 0.02

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights by their folder (None: the model as it started) and version."""

    path: Path | None
    version: int


@dataclass(frozen=True, slots=True)
class _Load:
    """What the workers are told to load: files with their SHA-256 ('' where none is known)."""

    path: Path | None
    folder: Path
    files: list[list[str]]
    num_tensors: int


class VllmWeights:
    """The weights of one engine: the active ones, those before, and how to change them."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._shapes: Shapes = {}
        self._tied = False
        self._prepared: _Load | None = None
        self.active = Weights(None, 0)
        self.previous: Weights | None = None

    async def inspect(self) -> None:
        """Read names and shapes of the model's tensors. Raises `EngineError` if the folder is no model."""
        config = await asyncio.to_thread(read_config, self._model)
        self._tied = ties_embeddings(config)
        self._shapes = await asyncio.to_thread(checkpoint_shapes, self._model)

    async def begin(self, process: VllmProcess, weights: Weights) -> None:
        """Give a fresh engine its first weights."""
        if weights.path is not None:
            await self._load(process, await asyncio.to_thread(self._check, weights.path))
        await self._label(process, weights)
        self.active, self.previous = weights, None

    async def prepare(self, path: Path | None) -> None:
        """Verify the folder whole, for the next `switch`. Raises `WeightsError`."""
        if self._prepared is None or self._prepared.path != path:
            self._prepared = await asyncio.to_thread(self._check, path)

    async def switch(self, process: VllmProcess, weights: Weights, reset_cache: bool) -> None:
        """Load `weights` into the paused engine, or put the old ones back and raise.

        If even that fails the engine is stopped: it must not go on with weights that nobody can name.
        """
        await self.prepare(weights.path)
        load, self._prepared = self._prepared, None
        assert load is not None, "it was just prepared"
        old = self.active
        try:
            await self._load(process, load)
            await self._finish(process, weights, reset_cache)
        except BaseException as error:
            log.warning("weights %s were refused, version %d is put back: %s", weights.path, old.version, error)
            await self._put_back(process, old, reset_cache)
            raise
        self.active, self.previous = weights, old

    async def _put_back(self, process: VllmProcess, old: Weights, reset_cache: bool) -> None:
        if not process.alive:
            return
        try:
            await self._load(process, await asyncio.to_thread(self._check, old.path))
            await self._finish(process, old, reset_cache)
        except BaseException as error:
            await process.stop()
            raise EngineError(
                f"neither the new weights nor those of version {old.version} could be loaded ({error}); the engine is "
                "stopped and must be restarted"
            ) from error

    async def _finish(self, process: VllmProcess, weights: Weights, reset_cache: bool) -> None:
        if reset_cache:
            await _reset_prefix_cache(process)
        await self._label(process, weights)

    async def _label(self, process: VllmProcess, weights: Weights) -> None:
        await process.guard(process.llm.update_weight_version(str(weights.version)))

    async def _load(self, process: VllmProcess, load: _Load) -> None:
        answers: list[dict[str, Any]] = await process.call(
            "april_install", folder=str(load.folder), files=load.files, num_tensors=load.num_tensors
        )
        for answer in answers:
            if "refused" in answer:
                raise WeightsError(str(answer["refused"]))

    def _check(self, path: Path | None) -> _Load:
        """Everything that can be checked without the engine."""
        if path is None:
            return _Load(None, self._model, [[name, ""] for name in checkpoint_files(self._model)], len(self._shapes))
        try:
            manifest = verify_manifest(path)
            num_tensors = check_published(path, manifest, self._shapes, self._tied)
        except OSError as error:
            raise WeightsError(f"{path} can't be read ({error.strerror}); publish the folder again") from error
        return _Load(path, path, [[file.name, file.sha256] for file in manifest.files], num_tensors)


async def _reset_prefix_cache(process: VllmProcess) -> None:
    for _ in range(PREFIX_RESET_TRIES):
        if await process.guard(process.llm.reset_prefix_cache()):
            return
        await asyncio.sleep(PREFIX_RESET_WAIT_S)
    raise EngineError("the prefix cache could not be reset because requests still hold it; park them before an install")
