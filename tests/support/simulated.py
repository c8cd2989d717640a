"""What tests of streams share, without torch: requests, and what a stream delivered."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollout_service.engines.interface import Chunk, GenerationRequest, SamplingParameters, StreamEnd

PROMPT = (11, 12, 13)


@dataclass
class Collected:
    """Everything that a stream delivered."""

    chunks: list[Chunk] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [int(token) for chunk in self.chunks for token in chunk.tokens]

    @property
    def logprobs(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.float32), *(chunk.logprobs for chunk in self.chunks)])

    @property
    def versions(self) -> list[int]:
        return [chunk.version for chunk in self.chunks for _ in chunk.tokens]

    @property
    def end(self) -> StreamEnd | None:
        ends = [chunk.end for chunk in self.chunks]
        assert all(end is None for end in ends[:-1]), "only the last chunk ends a stream"
        return ends[-1]


def request(name: str, max_tokens: int, prefix: Sequence[int] = ()) -> GenerationRequest:
    """A request with a short prompt, followed by the response so far."""
    return GenerationRequest(name, (*PROMPT, *prefix), len(prefix), SamplingParameters(max_tokens - len(prefix), 1.0))


async def collect(chunks: AsyncIterator[Chunk]) -> Collected:
    """Read a stream to its end."""
    return Collected([chunk async for chunk in chunks])


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop turn until `condition` holds; raises TimeoutError if it does not for a minute."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # engines tell what they did by their stats only
            await asyncio.sleep(0)
