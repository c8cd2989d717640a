"""DeepSpeed's checkpoints, and their conversion when another number of ranks reads them.

Always true: a checkpoint is written in DeepSpeed's own sharded form, each rank its part; what reads it with as many
ranks reads exactly that; with another number it is first turned into DeepSpeed's universal form, whose unit is one
parameter, in a folder of its own that is removed afterwards, so that the checkpoint itself is never touched.

Without ZeRO every rank holds everything and nothing needs to be converted.
"""

import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from protocol.errors import TrainingError
from trainer.distributed import Ranks

LOG = logging.getLogger("april.trainer")

# Without it the converter refuses checkpoints of ZeRO 1 and 2; there are no parallel layers to describe besides.
CLIENT_STATE: dict[str, Any] = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
CONVERTER = "deepspeed.checkpoint.ds_to_universal"
NUM_WORKERS = 2  # processes that each hold one shard in memory
TAIL_CHARS = 600  # of the converter's output, in an error


def load_state(engine: Any, folder: Path, tag: str, ranks: Ranks, same_ranks: bool, strict: bool) -> None:
    """Load `folder/tag` into a DeepSpeed engine; every rank calls it. `strict`: all parameters must be in it."""
    if not (folder / tag).is_dir():
        raise TrainingError(f"{folder} holds no state of the {tag}; start with the settings that wrote it")
    if same_ranks or not engine.zero_optimization():
        _load(engine, folder, tag, strict)
        return
    converted = folder.parent / f".{folder.name}.universal.partial"
    if ranks.is_main:
        LOG.info("%s was written by another number of ranks: converting its %s", folder.name, tag)
        shutil.rmtree(converted, ignore_errors=True)
    problem = ranks.share(_convert(folder, converted, tag) if ranks.is_main else None)
    if problem:
        raise TrainingError(
            f"{folder} can't be converted to this number of ranks; start with as many as wrote it: {problem}"
        )
    # DeepSpeed takes this from its configuration, which was made before the checkpoint was looked at.
    engine._config.load_universal_checkpoint = True
    try:
        _load(engine, converted, tag, strict)
    finally:
        engine._config.load_universal_checkpoint = False
    ranks.barrier()
    if ranks.is_main:
        shutil.rmtree(converted)


def _load(engine: Any, folder: Path, tag: str, strict: bool) -> None:
    path, _ = engine.load_checkpoint(str(folder), tag=tag, load_module_strict=strict)
    if path is None:
        raise TrainingError(f"{folder} can't be read; restore it from a copy (docs/training.md)")


def _convert(folder: Path, converted: Path, tag: str) -> str | None:
    """What went wrong, if something did. Names are relative: the converter reads them as regular expressions."""
    words = ["--input_folder", f"{folder.name}/{tag}", "--output_folder", f"{converted.name}/{tag}"]
    workers = [f"--num_extract_workers={NUM_WORKERS}", f"--num_merge_workers={NUM_WORKERS}"]
    done = subprocess.run(  # noqa: S603  our own command line
        [sys.executable, "-m", CONVERTER, *words, *workers],
        cwd=folder.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"…{(done.stdout + done.stderr)[-TAIL_CHARS:]}" if done.returncode else None
