"""What the service costs: its own CPU time on the simulated engine, and its share of a real engine's tokens/s."""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.long_tail_parts.contender import contending
from benchmarks.long_tail_parts.engine import ForcedPool, prompt_tokens
from protocol.settings import RunSettings
from rollout_service.engines.interface import GenerationRequest, SamplingParameters
from rollout_service.engines.simulated import SimulatedEngine
from rollout_service.engines.vllm_engine import VllmEngine
from rollout_service.engines.vllm_outputs import sampling_parameters
from rollout_service.tuning.workload import DrawnWorkload, PromptLengths

GROUP_SAMPLES = 8
LENGTHS = (40, 80, 160)
STEP_S = 0.02  # of the simulated engine; its own computing is in the CPU time, and said so


async def simulated_service(in_flight: int, folder: Path) -> dict[str, object]:
    """One round with `in_flight` samples at once: CPU time of this process for each token and each finished sample."""
    groups = max(2, in_flight // GROUP_SAMPLES)
    settings = RunSettings.model_validate(
        {
            "run": {"name": f"overhead-{in_flight}", "dir": folder / str(in_flight)},
            "data": {"train_batch_size": groups, "max_prompt_length": 32, "max_response_length": max(LENGTHS)},
            "rollout": {"n": GROUP_SAMPLES, "ratio": 1.0, "lookahead": 0, "checkpoint_interval_s": 600.0},
            "engine": {
                "backend": "simulated",
                "max_num_seqs": groups * GROUP_SAMPLES,
                "simulated": {"step_base_s": STEP_S, "step_per_sequence_s": 0.0, "prefill_per_token_s": 0.0},
            },
        }
    )
    workload = DrawnWorkload(LENGTHS, (24,), seed=0)
    pool = ForcedPool([SimulatedEngine(settings, "engine-0", lambda _: max(LENGTHS))], workload, GROUP_SAMPLES)
    await pool.start()
    began_cpu_s = time.process_time()
    async with contending(settings, pool, folder, num_prompts=groups):
        used_s = time.process_time() - began_cpu_s
        tokens = pool.look().tokens
    await pool.close()
    return {
        "samples in flight": groups * GROUP_SAMPLES,
        "CPU us/sample": used_s / (groups * GROUP_SAMPLES) * 1e6,
        "CPU us/token": used_s / tokens * 1e6,
    }


class _EvenWorkload:
    """Every response as long as every other, so that both sides end at once and no tail is measured."""

    def __init__(self, length: int) -> None:
        self._length = length

    def prompt(self, index: int, num_samples: int) -> PromptLengths:
        """Prompt number `index`."""
        return PromptLengths((self._length,) * num_samples, 24, prompt_id=str(index))


async def against_bare_engine(
    model: Path, slots: int, length: int, repeats: int, num_threads: int | None
) -> Sequence[dict[str, object]]:
    """The same requests straight to AsyncLLM and through the whole service, in turns on one engine."""
    with tempfile.TemporaryDirectory(prefix="april-bare-") as temporary:
        folder = Path(temporary)
        settings = RunSettings.model_validate(
            {
                "run": {"name": "bare", "dir": folder},
                "model": {"path": model},
                "data": {"max_prompt_length": 24, "max_response_length": length, "train_batch_size": slots // 4},
                "rollout": {"n": 4, "ratio": 1.0, "lookahead": 0, "checkpoint_interval_s": 600.0},
                "engine": {"max_num_seqs": slots, "num_threads": num_threads, "dtype": "float32"},
            }
        )
        engine = VllmEngine(settings, "engine-0")
        pool = ForcedPool([engine], _EvenWorkload(length), 4)
        await pool.start()
        try:
            rates: dict[str, list[float]] = {"bare AsyncLLM": [], "whole service": []}
            await _bare(engine, slots, length, "warm")
            for number in range(repeats):
                rates["bare AsyncLLM"].append(await _bare(engine, slots, length, str(number)))
                rates["whole service"].append(await _served(settings, pool, model, folder / str(number)))
        finally:
            await pool.close()
    bare = float(np.median(rates["bare AsyncLLM"]))
    return [
        {"through": name, "median tokens/s": float(np.median(all_)), "of bare": float(np.median(all_)) / bare}
        for name, all_ in rates.items()
    ]


async def _bare(engine: VllmEngine, slots: int, length: int, name: str) -> float:
    llm: Any = engine._process.llm if engine._process else None  # pyright: ignore[reportPrivateUsage]  # what the service stands on

    async def one(number: int) -> int:
        tokens = 0
        request = GenerationRequest(f"bare{name}-{number}", prompt_tokens(number), 0, SamplingParameters(length, 1.0))
        parameters = sampling_parameters(request, ())
        parameters.ignore_eos = True
        async for output in llm.generate(
            {"prompt_token_ids": list(prompt_tokens(number))}, parameters, request.request_id
        ):
            tokens += len(output.outputs[0].token_ids)
        return tokens

    began_s = time.perf_counter()
    tokens = sum(await asyncio.gather(*(one(number) for number in range(slots))))
    return tokens / (time.perf_counter() - began_s)


async def _served(settings: RunSettings, pool: ForcedPool, model: Path, folder: Path) -> float:
    run = settings.run.model_copy(update={"dir": folder})
    pool.look()
    began_s = time.perf_counter()
    async with contending(settings.model_copy(update={"run": run}), pool, model, num_prompts=1000):
        seconds = time.perf_counter() - began_s
        tokens = pool.look().tokens
    return tokens / seconds
