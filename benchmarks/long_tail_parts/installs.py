"""What a benchmark's pool costs beside its decoding: an install, measured before the rounds."""

import shutil
import time
from pathlib import Path

from protocol.manifest import write_manifest
from rollout_service.engines.pool import EnginePool

REPEATS = 2


async def install_s(pool: EnginePool, model: Path, folder: Path) -> float:
    """Seconds of an install, the better of two."""
    best = float("inf")
    for number in range(REPEATS):
        copy = folder / f"install-{number}"
        shutil.copytree(model, copy)
        (copy / "manifest.json").unlink()
        write_manifest(copy, number)
        began_s = time.perf_counter()
        await pool.install(copy, pool.version)
        best = min(best, time.perf_counter() - began_s)
    return best
