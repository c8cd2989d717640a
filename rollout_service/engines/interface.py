"""What an engine replica does, whoever runs it.

Always true of an engine:
- a stream that was started ends: with `stop`, `length` or `abort`, or by raising `EngineError`;
- every token the engine delivered, before or with an abort, is yielded once and in order, with its log-probability;
- `abort` reaches a request however early it comes: one that is not registered yet is aborted when it is;
- between two installs every token is written by the one version that `stats().version` names;
- after `install` returns, every later token is written by the new version and no KV block of an older one is reused;
  if it raises, the version and the weights are what they were.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from protocol.samples import Logprobs, Tokens


class StreamEnd(StrEnum):
    """Why a stream ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How one request is sampled; made anew for each request, shared by none.

    `seed` None: the engine's own randomness.
    """

    max_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Token ids in, tokens out.

    `prompt_token_ids` is the prompt and the response so far; the last `num_prefix_tokens` of it are the response so
    far. `request_id` is `SAMPLE@ATTEMPT`, unique for each attempt.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    num_prefix_tokens: int
    sampling: SamplingParameters


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one request. tokens [T] int32, logprobs [T] float32 (processed: temperature applied), one version.

    `end` is set on the last chunk only. A chunk may be empty. `kv_kept`: written on a KV cache that was kept over an
    install.
    """

    tokens: Tokens
    logprobs: Logprobs
    version: int
    end: StreamEnd | None = None
    kv_kept: bool = False


@dataclass(frozen=True, slots=True)
class EngineStats:
    """State of one replica. `epoch` grows at every restart of the engine behind it.

    `kv_use`: share of its KV cache that running requests hold; `num_preemptions`: requests that it had to set aside for
    want of KV cache since it was started; None if the engine doesn't say.
    """

    worker: str
    epoch: int
    slots: int
    num_running: int
    version: int
    alive: bool
    tokens_generated: int
    num_restarts: int
    kv_use: float | None = None
    num_preemptions: int | None = None


class Engine(Protocol):
    """One replica."""

    @property
    def worker(self) -> str:
        """Id of this replica, unique within the service."""
        ...

    @property
    def slots(self) -> int:
        """Sequences that it decodes at once."""
        ...

    @property
    def takes_seeds(self) -> bool:
        """Whether requests may carry a seed (vLLM on CPU dies of one)."""
        ...

    async def start(self) -> None:
        """Load the model as it starts (version 0). Raises EngineError with what to do."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Stream the response to one request."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; their streams deliver what there is and end with `abort`."""
        ...

    async def wait_idle(self) -> None:
        """Return when no request runs."""
        ...

    async def install(self, path: Path, version: int) -> None:
        """Load the weights in `path`, check them against its manifest, reset the prefix cache, become `version`.

        With requests running it keeps them and their KV cache (`rollout.on_install = "keep"`); the caller parks them
        first otherwise. Raises WeightsError or EngineError.
        """
        ...

    async def restart(self, path: Path | None, version: int) -> None:
        """After the engine died: start it again with the weights of `version` (None: the model as it starts)."""
        ...

    def stats(self) -> EngineStats:
        """State of this replica, without waiting."""
        ...

    async def close(self) -> None:
        """Stop the replica and its processes."""
        ...
