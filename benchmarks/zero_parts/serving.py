"""The real engine with published weights: what it samples, and the log-probs that it says of it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rollouts import Rollout
from protocol.settings import RunSettings
from rollout_service.engines.interface import Engine, GenerationRequest, SamplingParameters, StreamEnd


def serve_all(
    settings: RunSettings, folders: Sequence[Path], prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[list[Rollout]]:
    """One response to each of `prompts` for each of `folders`, installed one after the other in one engine."""
    from rollout_service.engines.vllm_engine import VllmEngine

    async def serve() -> list[list[Rollout]]:
        engine = VllmEngine(settings, "engine-0")
        await engine.start()
        try:
            served: list[list[Rollout]] = []
            for version, folder in enumerate(folders, start=1):
                await engine.install(folder, version)
                served.append(await _respond(engine, version, prompts, max_tokens))
            return served
        finally:
            await engine.close()

    return asyncio.run(serve())


async def _respond(engine: Engine, version: int, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Rollout]:
    sampling = SamplingParameters(max_tokens, temperature=1.0)
    requests = [GenerationRequest(f"v{version}-{i}@1", tuple(prompt), 0, sampling) for i, prompt in enumerate(prompts)]
    return list(await asyncio.gather(*(_collect(engine, request) for request in requests)))


async def _collect(engine: Engine, request: GenerationRequest) -> Rollout:
    rollout = Rollout(list(request.prompt_token_ids))
    async for chunk in engine.generate(request):
        rollout.tokens += [int(token) for token in chunk.tokens]
        rollout.logprobs += [float(logprob) for logprob in chunk.logprobs]
        rollout.versions += [chunk.version] * len(chunk.tokens)
        rollout.ended = chunk.end is StreamEnd.STOP
    return rollout
