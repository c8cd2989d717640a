"""Measures a running engine: decoding at several loads and contexts, for `april calibrate`.

Always true:
- what is measured is an engine as the run's settings start it, through the same interface as the service uses;
- the measurement ends by its time limit: requests that run then are aborted, and what they wrote still counts;
- prompts are random tokens, all different, so that no prefix cache helps.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from protocol.settings import RunSettings
from protocol.settings.rollout import EngineBackend
from rollout_service.engines.checkpoint import end_token_ids, kv_bytes_per_token, read_config, text_config
from rollout_service.engines.interface import GenerationRequest, SamplingParameters
from rollout_service.engines.pool import EnginePool, build_pool
from rollout_service.engines.vllm_arguments import BYTES_OF_DTYPE, default_kv_bytes, model_folder
from rollout_service.tuning.calibration import Calibration, Stretch, fit

MEASURE_S = 60.0  # with an engine's start it stays under two minutes
NUM_TOKENS = 64  # of each response: some stretches' worth, at every load
NUM_WINDOWS = 4  # stretches of one run: the load differs between them when responses end early
MIN_WINDOW_CHUNKS = 4  # chunks come when the event loop gets to them: in shorter stretches that is most of the time
MIN_CONTEXT = 8  # of the shortest prompts
LOADS = (1 / 16, 1 / 4, 1 / 2, 1)  # of the slots, besides a single sequence
REPEATS = 2
RANDOM_VOCABULARY = 1000  # of an engine without a model

Said = Callable[[str], None]


@dataclass(slots=True)
class _Stream:
    """When the tokens of one request came."""

    context: int
    chunks: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.chunks)


async def calibrate_engine(settings: RunSettings, say: Said) -> Calibration:
    """Start one replica as the settings say, measure it, and fit. The model is of all replicas together."""
    alone = settings.model_copy(update={"engine": settings.engine.model_copy(update={"num_replicas": 1})})
    pool = build_pool(alone)
    kv_tokens = kv_capacity(settings)
    try:
        say("starting the engine")
        await pool.start()
        stretches = await measure(pool, alone, kv_tokens, MEASURE_S, say)
    finally:
        await pool.close()
    found = fit(stretches, settings.engine.max_num_seqs, kv_tokens)
    if settings.engine.num_replicas == 1:
        return found
    return Calibration(
        found.engine.scaled(settings.engine.num_replicas),
        found.r_squared,
        found.median_error,
        found.worst_error,
        found.residuals,
        found.stretches,
    )


def kv_capacity(settings: RunSettings) -> int:
    """Tokens that the KV cache of one replica holds; 0 if only the engine knows (a GPU's share of memory)."""
    engine = settings.engine
    if engine.backend is EngineBackend.SIMULATED or settings.model.path is None:
        return 0
    import torch

    if torch.cuda.is_available() and engine.kv_cache_memory_bytes is None:
        return 0
    config = read_config(model_folder(settings))
    dtype = "float32" if engine.dtype == "auto" and not torch.cuda.is_available() else engine.dtype
    named = dtype if dtype != "auto" else str(text_config(config).get("dtype") or config.get("torch_dtype"))
    per_token = kv_bytes_per_token(config, BYTES_OF_DTYPE.get(named, 4))
    return (engine.kv_cache_memory_bytes or default_kv_bytes(settings, config, dtype)) // per_token


def grid(slots: int, max_model_len: int, kv_tokens: int, num_tokens: int) -> list[tuple[int, int]]:
    """(running, context) to measure, the smallest first; none that would fill the KV cache."""
    loads = sorted({1, *(max(1, round(share * slots)) for share in LOADS)})
    longest = max(1, max_model_len - num_tokens)
    contexts = sorted({min(MIN_CONTEXT, longest), max(1, longest // 2), longest})
    points = [(running, context) for context in contexts for running in loads]
    return [(r, c) for r, c in points if not kv_tokens or r * (c + num_tokens) <= kv_tokens or r == 1]


async def measure(pool: EnginePool, settings: RunSettings, kv_tokens: int, limit_s: float, say: Said) -> list[Stretch]:
    """Stretches of every point of the grid, within the time limit."""
    num_tokens = max(1, min(NUM_TOKENS, settings.data.max_response_length, settings.max_model_len - 1))
    points = grid(pool.slots, settings.max_model_len, kv_tokens, num_tokens)
    drawer = _PromptDrawer(settings)
    await _run(pool, [drawer.draw(MIN_CONTEXT)], 2, limit_s, "warm-up")
    stretches: list[Stretch] = []
    ends_at = time.monotonic() + limit_s
    rounds = [point for _ in range(REPEATS) for point in points]
    for index, (running, context) in enumerate(rounds):
        share_s = (ends_at - time.monotonic()) / (len(rounds) - index)
        say(f"{index + 1} of {len(rounds)}: {running} sequences with {context} tokens each")
        prompts = [drawer.draw(context) for _ in range(running)]
        began, streams = await _run(pool, prompts, num_tokens, share_s, f"p{index}")
        stretches += stretches_of(began, streams)
    return stretches


async def _run(
    pool: EnginePool, prompts: Sequence[tuple[int, ...]], num_tokens: int, limit_s: float, name: str
) -> tuple[float, list[_Stream]]:
    """All prompts at once; when what came of them came."""
    requests = [
        GenerationRequest(f"calibrate-{name}-{index}@1", prompt, 0, SamplingParameters(num_tokens, 1.0))
        for index, prompt in enumerate(prompts)
    ]
    streams = [_Stream(len(prompt)) for prompt in prompts]

    async def follow(request: GenerationRequest, stream: _Stream) -> None:
        async for chunk in pool.generate(request):
            if len(chunk.tokens):
                stream.chunks.append((time.monotonic(), len(chunk.tokens)))

    began = time.monotonic()
    tasks = [asyncio.ensure_future(follow(r, s)) for r, s in zip(requests, streams, strict=True)]
    try:
        _, late = await asyncio.wait(tasks, timeout=limit_s)
        if late:
            await pool.abort([request.request_id for request in requests])
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return began, streams


def stretches_of(began: float, streams: Sequence[_Stream]) -> list[Stretch]:
    """Cut a run into its prefill and some windows of decoding, at the times when its longest response got tokens.

    That response is in every step, so its tokens count the steps; in the first window everything is prefilled.
    """
    written = [stream for stream in streams if stream.chunks]
    if not written:
        return []
    longest = max(written, key=lambda stream: stream.num_tokens)
    prefilled_at = max(stream.chunks[0][0] for stream in written)
    later = [at for at, _ in longest.chunks if at >= prefilled_at]
    windows = max(1, min(NUM_WINDOWS, len(later) // MIN_WINDOW_CHUNKS))
    edges = [later[round(i * (len(later) - 1) / windows)] for i in range(windows + 1)] if later else []
    prefilled = float(sum(stream.context for stream in streams))
    stretches = [_between(began, max(prefilled_at, *edges[:1]) if edges else prefilled_at, written, longest, prefilled)]
    for start, end in pairwise(sorted(set(edges))):
        stretches.append(_between(start, end, written, longest, 0.0))
    return [stretch for stretch in stretches if stretch.seconds > 0]


def _between(start: float, end: float, streams: Sequence[_Stream], longest: _Stream, prefilled: float) -> Stretch:
    running = context = 0.0
    for stream in streams:
        have = stream.context
        for at, count in stream.chunks:
            if start < at <= end:
                running += count
                context += count * have + count * (count - 1) / 2
            have += count
    steps = float(sum(count for at, count in longest.chunks if start < at <= end))
    return Stretch(end - start, steps, running, context, prefilled)


class _PromptDrawer:
    """Random prompts of tokens that end nothing."""

    def __init__(self, settings: RunSettings) -> None:
        self._rng = random.Random(settings.run.seed)  # noqa: S311  a measurement
        self._ends: frozenset[int] = frozenset()
        self._vocabulary = RANDOM_VOCABULARY
        if settings.engine.backend is not EngineBackend.SIMULATED:
            folder = model_folder(settings)
            self._vocabulary = int(text_config(read_config(folder)).get("vocab_size") or RANDOM_VOCABULARY)
            self._ends = frozenset(end_token_ids(folder))

    def draw(self, num_tokens: int) -> tuple[int, ...]:
        """One prompt."""
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            token = self._rng.randrange(1, self._vocabulary)
            if token not in self._ends:
                tokens.append(token)
        return tuple(tokens)
