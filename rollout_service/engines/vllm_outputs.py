"""From vLLM's outputs to chunks: as many log-probs as tokens, and the version that wrote each of them.

vLLM merges what a slow reader left unread, so one output may span an install. The version of a token is therefore
never taken from the time it is read at: the engine's core stamps every step with its label, and vLLM keeps the index at
which each label starts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from protocol.errors import EngineError
from protocol.samples import NO_LOGPROBS, NO_TOKENS
from rollout_service.engines.interface import Chunk, GenerationRequest, StreamEnd

ENDS = {"stop": StreamEnd.STOP, "length": StreamEnd.LENGTH, "abort": StreamEnd.ABORT}
Starts = Sequence[tuple[int, int]]  # (version, index of its first token within this stream), in order


@dataclass(slots=True)
class VllmStream:
    """One open request: what vLLM calls it, how far it is, and whether it is to be aborted or was kept."""

    request: GenerationRequest
    version: int
    """Active version when the request passed the gate."""
    queue: Any = None
    labels: list[tuple[str, int]] | None = None
    """vLLM's own list of (label, index of its first token), which grows as labels change."""
    num_tokens: int = 0
    entered: bool = False
    aborted: bool = False
    kept: bool = False
    """Whether weights were installed while it ran."""

    def starts(self, completion: Any) -> Starts:
        """At which token each version starts, by the labels of the engine's own steps."""
        if not self.kept:
            return ((self.version, 0),)
        if completion.weight_versions:
            return [(int(span.version), span.start) for span in completion.weight_versions]
        return [(int(label), start) for label, start in self.labels or ()] or ((self.version, 0),)


def sampling_parameters(request: GenerationRequest, end_ids: Sequence[int]) -> Any:
    """A SamplingParams of its own for each request: vLLM and its callers may change it."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(0, sampling.top_k),
        min_p=sampling.min_p,
        seed=sampling.seed,
        stop_token_ids=list(dict.fromkeys((*sampling.stop_token_ids, *end_ids))),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def engine_input(request: GenerationRequest) -> Any:
    """Token ids in vLLM's own form, which it need not render in a thread."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(list(request.prompt_token_ids))


def chunks_of(stream: VllmStream, output: Any) -> Iterator[Chunk]:
    """Chunks of one version each for the new tokens of `output`. Raises `EngineError` if vLLM's arrays do not match."""
    completion = output.outputs[0]
    reason = completion.finish_reason
    if output.finished and reason not in ENDS:
        raise EngineError(f"request {stream.request.request_id} failed in the engine ({reason}); it is tried again")
    tokens = np.asarray(completion.token_ids, np.int32)
    logprobs = _logprobs(stream, completion.logprobs, tokens)
    end = ENDS[reason] if output.finished else None
    begin = stream.num_tokens
    stream.num_tokens += len(tokens)
    starts = stream.starts(completion)
    pieces = _split(starts, begin, stream.num_tokens) or [(starts[-1][0], begin, begin)]
    for version, first, last in pieces:
        kept = stream.kept and version != stream.version
        piece = slice(first - begin, last - begin)
        is_last = last == stream.num_tokens
        yield Chunk(tokens[piece], logprobs[piece], version, end if is_last else None, kept)


def empty_chunk(version: int, end: StreamEnd) -> Chunk:
    """The chunk of a stream that ends without a token."""
    return Chunk(NO_TOKENS, NO_LOGPROBS, version, end)


def _logprobs(stream: VllmStream, flat: Any, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Log-probability of each sampled token [T]; the engine puts the sampled token first at its position."""
    positions: list[int] = list(flat.start_indices) if flat is not None else []
    if len(positions) != len(tokens):
        raise EngineError(
            f"request {stream.request.request_id} got {len(positions)} log-probs for {len(tokens)} tokens from vLLM"
        )
    if flat is None or not len(tokens):
        return NO_LOGPROBS
    if not np.array_equal(np.asarray(flat.token_ids, np.int32)[positions], tokens):
        raise EngineError(f"request {stream.request.request_id} got log-probs of other tokens than it was sent")
    return np.asarray(flat.logprobs, np.float32)[positions]


def _split(starts: Starts, begin: int, end: int) -> list[tuple[int, int, int]]:
    """(version, first, last) pieces of the tokens [begin, end) by the indices at which versions start."""
    ends = [start for _, start in starts[1:]] + [end]
    pieces = [(v, max(begin, s), min(end, e)) for (v, s), e in zip(starts, ends, strict=True)]
    return [(version, first, last) for version, first, last in pieces if first < last]
