"""From what the buffer holds to what the HTTP API shows."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from protocol.batch import Batch
from protocol.messages import GroupView, SampleView, SegmentView
from protocol.samples import Group, Sample, Segment
from protocol.states import DropReason


def view_group(group: Group, decode: Callable[[Sequence[int]], str]) -> GroupView:
    """One group as JSON. The text is for reading: the token ids are what was sampled."""
    return GroupView(
        group_id=group.group_id,
        state=group.state,
        prompt_id=group.prompt.prompt_id,
        data_source=group.prompt.data_source,
        prompt=group.prompt.text,
        prompt_token_ids=list(group.prompt.token_ids),
        admitted_version=group.admitted_version,
        step=group.step,
        drop_reason=DropReason(group.drop_reason) if group.drop_reason else None,
        samples=[_view_sample(sample, decode) for sample in group.samples],
    )


def with_tokens_of(group: Group, batch: Batch) -> Group:
    """A leased group with its tokens, which are in the batch's file and no longer in Redis."""
    rows = {header.sample_id: row for row, header in enumerate(batch.header.samples)}
    samples = (
        replace(s, segments=_segments(batch, rows[s.sample_id])) if s.sample_id in rows else s for s in group.samples
    )
    return replace(group, samples=tuple(samples))


def _segments(batch: Batch, row: int) -> tuple[Segment, ...]:
    begin = int(batch.sample_offsets[row] + batch.prompt_lengths[row])
    return tuple(
        Segment(
            span.start,
            span.version,
            batch.tokens[begin + span.start : begin + span.end],
            batch.logprobs[begin + span.start : begin + span.end],
            span.kv_kept,
        )
        for span in batch.header.samples[row].segments
    )


def _view_sample(sample: Sample, decode: Callable[[Sequence[int]], str]) -> SampleView:
    return SampleView(
        sample_id=sample.sample_id,
        state=sample.state,
        num_tokens=sample.num_tokens,
        num_resumes=sample.num_resumes,
        num_failures=sample.num_failures,
        finish_reason=sample.finish_reason,
        fail_reason=sample.fail_reason,
        error=sample.error,
        reward=sample.reward.value if sample.reward else None,
        reward_parts=sample.reward.parts if sample.reward else {},
        segments=[
            SegmentView(
                start=s.start,
                version=s.version,
                kv_kept=s.kv_kept,
                tokens=s.tokens.tolist(),
                logprobs=[round(float(p), 6) for p in s.logprobs],
            )
            for s in sample.segments
        ],
        text=decode(sample.tokens.tolist()) if sample.num_tokens else None,
        continued_from=sample.continued_from,
    )
