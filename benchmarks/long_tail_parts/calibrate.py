"""An engine model of the pool that a benchmark runs on, measured before it: decoding, prefills, and an install."""

import asyncio
import itertools
import shutil
import time
from pathlib import Path

from protocol.manifest import write_manifest
from rollout_service.engines.interface import GenerationRequest, SamplingParameters
from rollout_service.engines.pool import EnginePool
from rollout_service.tuning.calibration import Calibration, Stretch, fit

DECODE_TOKENS = 96  # a stretch lasts a second or two
FIRST_TOKEN = 97
REPEATS = 2

_names = itertools.count()


async def stretch(pool: EnginePool, running: int, prompt: int, tokens: int) -> Stretch:
    """So many sequences of one length, from nothing to nothing."""

    async def one(number: int) -> None:
        name = f"calibrate{next(_names)}@1"
        ids = tuple(FIRST_TOKEN + (number * 31 + i * i + i * number) % 26 for i in range(prompt))
        async for _ in pool.generate(GenerationRequest(name, ids, 0, SamplingParameters(tokens, 1.0))):
            pass

    began_s = time.perf_counter()
    await asyncio.gather(*(one(next(_names)) for _ in range(running)))
    seconds = time.perf_counter() - began_s
    context = running * (tokens * prompt + tokens * (tokens - 1) / 2)
    return Stretch(seconds, tokens, running * tokens, context, running * prompt)


async def calibrate(pool: EnginePool, longest: int) -> Calibration:
    """Decoding with few to all slots in use, short and long contexts, and prefills of long prompts."""
    slots = pool.slots
    await stretch(pool, slots, 24, 8)  # the first steps of an engine are slow
    stretches: list[Stretch] = []
    for _ in range(REPEATS):
        for running in sorted({1, max(1, slots // 8), max(1, slots // 4), max(1, slots // 2), slots}):
            stretches.append(await stretch(pool, running, 24, DECODE_TOKENS))
        stretches.append(await stretch(pool, slots, longest - DECODE_TOKENS, DECODE_TOKENS // 4))
        stretches.append(await stretch(pool, max(1, slots // 4), longest - 8, 4))
    return fit(stretches, slots, 0)


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
