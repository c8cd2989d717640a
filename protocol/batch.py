"""The wire form of a batch: safetensors bytes, and the same as JSON for people.

1-D tensors (T = all tokens of all samples, S = samples that are trained on):

    tokens         i32 [T]    prompt and response, one sample after the other
    logprobs       f32 [T]    behaviour log-probs; 0 on prompt tokens
    loss_mask      u8  [T]    1 on response tokens
    versions       i32 [T]    policy version that wrote the token; -1 on prompt tokens
    sample_offsets i64 [S+1]  sample s is tokens[sample_offsets[s] : sample_offsets[s+1]]
    prompt_lengths i32 [S]
    group_index    i32 [S]    index into header.groups
    rewards        f32 [S]

Everything else is one JSON string under the metadata key `batch` (`BatchHeader`). The same groups always give the
same bytes: nothing in it depends on the time or on who asks.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.numpy import save

from protocol.errors import DataError
from protocol.samples import Group, Sample
from protocol.states import FailReason, FinishReason, SampleState

MEDIA_TYPE = "application/vnd.april.batch"
TENSOR_DTYPES: dict[str, npt.DTypeLike] = {
    "tokens": np.int32,
    "logprobs": np.float32,
    "loss_mask": np.uint8,
    "versions": np.int32,
    "sample_offsets": np.int64,
    "prompt_lengths": np.int32,
    "group_index": np.int32,
    "rewards": np.float32,
}


class SegmentSpan(BaseModel):
    """Response tokens [start, end) of one sample, written by one policy version in one stretch."""

    model_config = ConfigDict(extra="forbid")
    start: int
    end: int
    version: int
    kv_kept: bool


class SampleHeader(BaseModel):
    """What a trained sample has besides its tensors.

    `continued_from`: the id under which a group of an earlier epoch started it, if that group was READY without it.
    """

    model_config = ConfigDict(extra="forbid")
    sample_id: str
    finish_reason: FinishReason
    num_resumes: int
    reward_parts: dict[str, float]
    segments: list[SegmentSpan]
    continued_from: str | None = None


class FailedSample(BaseModel):
    """A sample that the group goes on without."""

    model_config = ConfigDict(extra="forbid")
    sample_id: str
    reason: FailReason
    error: str | None


class GroupHeader(BaseModel):
    """One group of the batch."""

    model_config = ConfigDict(extra="forbid")
    group_id: str
    prompt_id: str
    data_source: str
    admitted_version: int
    failed: list[FailedSample]


class BatchHeader(BaseModel):
    """The JSON part of a batch. `policy_version` is the version that the trainer holds when the step starts."""

    model_config = ConfigDict(extra="forbid")
    format: int = 1
    run: str
    step: int
    policy_version: int
    groups: list[GroupHeader]
    samples: list[SampleHeader]


@dataclass(frozen=True, slots=True)
class Batch:
    """A decoded batch; the shapes are in the module's docstring."""

    header: BatchHeader
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    loss_mask: npt.NDArray[np.uint8]
    versions: npt.NDArray[np.int32]
    sample_offsets: npt.NDArray[np.int64]
    prompt_lengths: npt.NDArray[np.int32]
    group_index: npt.NDArray[np.int32]
    rewards: npt.NDArray[np.float32]

    @property
    def num_samples(self) -> int:
        """S."""
        return len(self.rewards)


def build_batch(run: str, step: int, policy_version: int, groups: Sequence[Group]) -> Batch:
    """Make the batch of `groups`, in the order given, from their SCORED samples; FAILED ones go to the header."""
    trained = [(i, g, s) for i, g in enumerate(groups) for s in g.samples if s.state is SampleState.SCORED]
    prompts = [np.asarray(g.prompt.token_ids, np.int32) for _, g, _ in trained]
    lengths = [len(p) + s.num_tokens for p, (_, _, s) in zip(prompts, trained, strict=True)]
    samples = [s for _, _, s in trained]
    pairs = list(zip(prompts, samples, strict=True))
    return Batch(
        header=BatchHeader(
            run=run,
            step=step,
            policy_version=policy_version,
            groups=[_group_header(g) for g in groups],
            samples=[_sample_header(s) for s in samples],
        ),
        tokens=_join([np.concatenate([p, s.tokens]) for p, s in pairs], np.int32),
        logprobs=_join([np.concatenate([np.zeros(len(p), np.float32), s.logprobs]) for p, s in pairs], np.float32),
        loss_mask=_join([np.repeat([0, 1], [len(p), s.num_tokens]) for p, s in pairs], np.uint8),
        versions=_join([np.concatenate([np.full(len(p), -1), s.versions]) for p, s in pairs], np.int32),
        sample_offsets=np.cumsum([0, *lengths], dtype=np.int64),
        prompt_lengths=np.asarray([len(p) for p in prompts], np.int32),
        group_index=np.asarray([i for i, _, _ in trained], np.int32),
        rewards=np.asarray([s.reward.value if s.reward else np.nan for s in samples], np.float32),
    )


def encode_batch(batch: Batch) -> bytes:
    """Safetensors bytes of a batch; equal batches give equal bytes."""
    tensors = {name: np.ascontiguousarray(getattr(batch, name), dtype) for name, dtype in TENSOR_DTYPES.items()}
    return save(tensors, metadata={"batch": batch.header.model_dump_json()})


def decode_batch(data: bytes) -> Batch:
    """The inverse of `encode_batch`; raises `DataError` on anything that is not a whole, consistent batch."""
    try:
        raw = dict(safetensors.deserialize(data))
        header = BatchHeader.model_validate_json(_metadata(data)["batch"])
        tensors = {
            name: np.frombuffer(raw[name]["data"], np.dtype(dtype).newbyteorder("<"))
            for name, dtype in TENSOR_DTYPES.items()
        }
    except (safetensors.SafetensorError, KeyError, ValueError, ValidationError) as error:
        raise DataError(f"these bytes are not a batch ({error}); ask the service for the step again") from error
    batch = Batch(header=header, **tensors)  # pyright: ignore[reportArgumentType]  names and dtypes come from TENSOR_DTYPES
    _check(batch)
    return batch


def batch_to_json(batch: Batch) -> dict[str, Any]:
    """The readable form: the header, and each tensor as a list."""
    return {"header": batch.header.model_dump(mode="json")} | {n: getattr(batch, n).tolist() for n in TENSOR_DTYPES}


def _check(batch: Batch) -> None:
    num_tokens = len(batch.tokens)
    per_token = (batch.logprobs, batch.loss_mask, batch.versions)
    per_sample = (batch.prompt_lengths, batch.group_index, batch.header.samples)
    offsets = batch.sample_offsets
    tiled = len(offsets) == batch.num_samples + 1 and offsets[0] == 0 and offsets[-1] == num_tokens
    if (
        any(len(t) != num_tokens for t in per_token)
        or any(len(t) != batch.num_samples for t in per_sample)
        or not tiled
    ):
        raise DataError("the batch's tensors disagree in length; ask the service for the step again")


def _metadata(data: bytes) -> dict[str, str]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]).get("__metadata__", {})


def _join(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)


def _group_header(group: Group) -> GroupHeader:
    failed = [
        FailedSample(sample_id=s.sample_id, reason=s.fail_reason or FailReason.ENGINE_ERROR, error=s.error)
        for s in group.samples
        if s.state is SampleState.FAILED
    ]
    return GroupHeader(
        group_id=group.group_id,
        prompt_id=group.prompt.prompt_id,
        data_source=group.prompt.data_source,
        admitted_version=group.admitted_version,
        failed=failed,
    )


def _sample_header(sample: Sample) -> SampleHeader:
    assert sample.finish_reason is not None, "a scored sample has finished"
    return SampleHeader(
        sample_id=sample.sample_id,
        finish_reason=sample.finish_reason,
        num_resumes=sample.num_resumes,
        reward_parts=sample.reward.parts if sample.reward else {},
        segments=[SegmentSpan(start=s.start, end=s.end, version=s.version, kv_kept=s.kv_kept) for s in sample.segments],
        continued_from=sample.continued_from,
    )
