"""From what the buffer holds to what the HTTP API shows."""

from collections.abc import Callable, Sequence

from protocol.messages import GroupView, SampleView, SegmentView
from protocol.samples import Group, Sample
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
    )
