"""Prompts, segments, samples and groups as data.

Always true of a `Sample`: its segments tile its tokens in order without gaps, and there is one log-probability and
one policy version for each token. Tokens are ids as the engine sampled them; text is only ever derived from them.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.errors import LengthError
from protocol.states import FailReason, FinishReason, GroupState, SampleState

Tokens = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
Json = None | bool | int | float | str | list[Any] | dict[str, Any]

MAX_GROUP_SAMPLES = 999  # what fits into the three digits of a sample's index
NO_TOKENS: Tokens = np.zeros(0, np.int32)
NO_LOGPROBS: Logprobs = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task from the data set, with what its reward needs.

    `prompt_id` is stable over epochs and restarts (data source and index); `token_ids` is what the engine is sent;
    `text` is for people and for scorers that want the question; `ground_truth` is JSON and is read by the scorer alone.
    """

    prompt_id: str
    token_ids: tuple[int, ...]
    text: str
    data_source: str
    ground_truth: Json = None
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens of one sample, written by one policy version in one stretch.

    `tokens` [T] int32, `logprobs` [T] float32: log-probabilities of the sampled tokens under the policy and temperature
    that sampled them. `kv_kept` says that a weight update happened under the KV cache that this segment was continued
    from. `start` is the index of the first token within the response.
    """

    start: int
    version: int
    tokens: Tokens
    logprobs: Logprobs
    kv_kept: bool = False

    def __post_init__(self) -> None:
        """Refuse a segment whose arrays differ in length."""
        if self.tokens.shape != self.logprobs.shape or self.tokens.ndim != 1:
            raise LengthError(
                f"a segment has {self.tokens.shape} tokens and {self.logprobs.shape} log-probs; they must be equal"
            )

    @property
    def end(self) -> int:
        """Index after the last token within the response."""
        return self.start + len(self.tokens)


def merge_segments(pieces: list[Segment]) -> list[Segment]:
    """Join neighbours that the same version wrote in one stretch; raise `LengthError` unless the pieces tile."""
    merged: list[Segment] = []
    expected = 0
    for piece in pieces:
        if piece.start != expected:
            raise LengthError(f"segments must tile the response: expected start {expected}, found {piece.start}")
        expected = piece.end
        last = merged[-1] if merged else None
        if last is not None and last.version == piece.version and last.kv_kept == piece.kv_kept:
            tokens = np.concatenate([last.tokens, piece.tokens])
            logprobs = np.concatenate([last.logprobs, piece.logprobs])
            merged[-1] = Segment(last.start, last.version, tokens, logprobs, last.kv_kept)
        elif len(piece.tokens):
            merged.append(piece)
    return merged


@dataclass(frozen=True, slots=True)
class Reward:
    """A finite scalar and the named parts it was made of."""

    value: float
    parts: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Sample:
    """One response with its whole provenance, as read from the buffer.

    `continued_from`: the id under which a group of an earlier epoch started it, if that group was READY without it.
    """

    sample_id: str
    group_id: str
    index: int
    state: SampleState
    segments: tuple[Segment, ...] = ()
    num_resumes: int = 0
    num_failures: int = 0
    finish_reason: FinishReason | None = None
    reward: Reward | None = None
    fail_reason: FailReason | None = None
    error: str | None = None
    continued_from: str | None = None

    @property
    def num_tokens(self) -> int:
        """Response tokens so far."""
        return self.segments[-1].end if self.segments else 0

    @property
    def tokens(self) -> Tokens:
        """Response token ids [T]."""
        return np.concatenate([NO_TOKENS, *(s.tokens for s in self.segments)])

    @property
    def logprobs(self) -> Logprobs:
        """Behaviour log-probabilities [T]."""
        return np.concatenate([NO_LOGPROBS, *(s.logprobs for s in self.segments)])

    @property
    def versions(self) -> Tokens:
        """Policy version of each response token [T]."""
        return np.concatenate([NO_TOKENS, *(np.full(len(s.tokens), s.version, np.int32) for s in self.segments)])


@dataclass(frozen=True, slots=True)
class Group:
    """The n samples of one prompt that the advantage is computed over.

    `seq` numbers groups in order of admission; `admitted_version` is the policy version that was active then.
    """

    group_id: str
    seq: int
    prompt: Prompt
    state: GroupState
    admitted_version: int
    samples: tuple[Sample, ...]
    step: int | None = None
    drop_reason: str | None = None
