"""Bytes in Redis and what they mean.

A sample's tokens are a LIST of pieces, one for each append. A piece is a little-endian header (start u32, version i32,
count u32, KV flag u8), then `count` int32 token ids, then `count` float32 log-probs: 8 bytes a token and 13 a piece.
Everything else is text or JSON. Nothing is pickled.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from protocol.errors import DataError, LengthError
from protocol.samples import Group, Prompt, Reward, Sample, Segment, merge_segments
from protocol.states import DropReason, FailReason, FinishReason, GroupState, SampleState

PIECE_HEADER = struct.Struct("<IiIB")
TOKEN_DTYPE = np.dtype("<i4")
LOGPROB_DTYPE = np.dtype("<f4")
BYTES_PER_TOKEN = TOKEN_DTYPE.itemsize + LOGPROB_DTYPE.itemsize

Record = Mapping[bytes, bytes]


def encode_piece(piece: Segment) -> bytes:
    """The bytes of one appended piece."""
    header = PIECE_HEADER.pack(piece.start, piece.version, len(piece.tokens), piece.kv_kept)
    return header + piece.tokens.astype(TOKEN_DTYPE).tobytes() + piece.logprobs.astype(LOGPROB_DTYPE).tobytes()


def decode_piece(data: bytes) -> Segment:
    """The inverse of `encode_piece`; raises DataError if the bytes are not as long as their header says."""
    if len(data) < PIECE_HEADER.size:
        raise DataError("a stored piece has no whole header: run `april buffer verify`")
    start, version, count, kv_kept = PIECE_HEADER.unpack_from(data)
    if len(data) != PIECE_HEADER.size + count * BYTES_PER_TOKEN:
        raise DataError(f"a stored piece of {count} tokens has {len(data)} bytes: run `april buffer verify`")
    tokens = np.frombuffer(data, TOKEN_DTYPE, count, PIECE_HEADER.size)
    logprobs = np.frombuffer(data, LOGPROB_DTYPE, count, PIECE_HEADER.size + tokens.nbytes)
    return Segment(start, version, tokens, logprobs, bool(kv_kept))


def piece_args(piece: Segment | None) -> list[str | int | bytes]:
    """Start, version, count and bytes of a piece, as the scripts take them; no piece has no start."""
    if piece is None:
        return ["", 0, 0, b""]
    if piece.start < 0:
        raise LengthError(f"a piece can't start at {piece.start}: give the number of tokens that are stored")
    return [piece.start, piece.version, len(piece.tokens), encode_piece(piece) if len(piece.tokens) else b""]


def encode_prompt(prompt: Prompt) -> str:
    """A prompt as JSON; raises DataError if its ground truth or extra isn't JSON."""
    try:
        return json.dumps(
            {
                "prompt_id": prompt.prompt_id,
                "token_ids": [int(token) for token in prompt.token_ids],
                "text": prompt.text,
                "data_source": prompt.data_source,
                "ground_truth": prompt.ground_truth,
                "extra": prompt.extra,
            }
        )
    except (TypeError, ValueError) as error:
        raise DataError(
            f"prompt {prompt.prompt_id} holds what is not JSON ({error}): convert it when loading"
        ) from error


def decode_prompt(data: bytes | str) -> Prompt:
    """The inverse of `encode_prompt`."""
    fields = json.loads(data)
    return Prompt(**(fields | {"token_ids": tuple(fields["token_ids"])}))


def encode_origin(prompt: Prompt) -> str:
    """What is kept of a dropped group's prompt."""
    return json.dumps({"prompt_id": prompt.prompt_id, "data_source": prompt.data_source})


def encode_reward(reward: Reward) -> str:
    """A reward as JSON; raises DataError unless everything in it is finite."""
    try:
        return json.dumps({"value": reward.value, "parts": reward.parts}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"a reward must be a finite number ({error}): fail the sample instead") from error


def decode_reward(data: bytes | str) -> Reward:
    """The inverse of `encode_reward`."""
    return Reward(**json.loads(data))


def decode_sample(sample_id: str, group_id: str, index: int, record: Record, pieces: list[bytes]) -> Sample:
    """A sample from its record and pieces."""
    fields = text_fields(record)
    return Sample(
        sample_id=sample_id,
        group_id=group_id,
        index=index,
        state=SampleState(fields["state"]),
        segments=tuple(merge_segments([decode_piece(p) for p in pieces])),
        num_resumes=int(fields.get("resumes", 0)),
        num_failures=int(fields.get("failures", 0)),
        finish_reason=FinishReason(fields["finish_reason"]) if "finish_reason" in fields else None,
        reward=decode_reward(fields["reward"]) if "reward" in fields else None,
        fail_reason=FailReason(fields["fail_reason"]) if "fail_reason" in fields else None,
        error=fields.get("error"),
        continued_from=fields.get("continued_from"),
    )


def decode_left(value: bytes | str | None) -> frozenset[int]:
    """Indices of the samples that a group is READY without."""
    text = value.decode() if isinstance(value, bytes) else value or ""
    return frozenset(int(index) for index in text.split())


def decode_group_state(value: bytes) -> tuple[GroupState, int | None]:
    """State and step from what the `groups` hash says of a group."""
    state, _, step = value.decode().partition(":")
    return GroupState(state), int(step) if step else None


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What is remembered of a dropped group."""

    reason: DropReason
    seq: int
    admitted_version: int
    prompt_id: str
    data_source: str

    @classmethod
    def decode(cls, data: bytes) -> "Tombstone":
        """From `REASON SEQ VERSION ORIGIN`."""
        reason, seq, version, origin = data.decode().split(" ", 3)
        return cls(DropReason(reason), int(seq), int(version), **json.loads(origin))

    def group(self, group_id: str) -> Group:
        """The dropped group, without samples."""
        prompt = Prompt(self.prompt_id, (), "", self.data_source)
        return Group(
            group_id, self.seq, prompt, GroupState.DROPPED, self.admitted_version, (), drop_reason=self.reason.value
        )


def text_fields(record: Record) -> dict[str, str]:
    """A HASH as text."""
    return {key.decode(): value.decode() for key, value in record.items()}


def int_fields(record: Record) -> dict[str, int]:
    """A HASH of numbers."""
    return {key.decode(): int(value) for key, value in record.items()}


def optional_int(value: Any) -> int | None:
    """A number, or None for a field that isn't there."""
    return None if value is None else int(value)
