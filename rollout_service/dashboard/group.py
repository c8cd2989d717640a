"""A group as its page shows it: what the template prints, and each sample's tokens for the script to tint."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protocol.messages import GroupView, SampleView
from rollout_service.dashboard.tokens import token_texts, visible


@dataclass(frozen=True, slots=True)
class SampleShown:
    """One sample. `tokens`: for each its text, version and log-prob, for the script."""

    view: SampleView
    text: str
    versions: str
    mean_logprob: float | None
    tokens: dict[str, list[object]]


@dataclass(frozen=True, slots=True)
class GroupShown:
    """One group; `prompt` and the texts have symbols for control characters."""

    view: GroupView
    prompt: str
    versions: list[int]
    samples: list[SampleShown]


def group_shown(view: GroupView, decode: Callable[[Sequence[int]], str]) -> GroupShown:
    """What the page shows of `view`. Decodes every token by itself: not for an event loop."""
    samples = [_sample_shown(sample, decode) for sample in view.samples]
    versions = sorted({s.version for sample in view.samples for s in sample.segments})
    return GroupShown(view=view, prompt=visible(view.prompt), versions=versions, samples=samples)


def _sample_shown(sample: SampleView, decode: Callable[[Sequence[int]], str]) -> SampleShown:
    tokens = [token for segment in sample.segments for token in segment.tokens]
    logprobs = [logprob for segment in sample.segments for logprob in segment.logprobs]
    return SampleShown(
        view=sample,
        text=visible(sample.text or ""),
        versions=" → ".join(f"v{s.version} × {len(s.tokens)}" for s in sample.segments),
        mean_logprob=sum(logprobs) / len(logprobs) if logprobs else None,
        tokens={
            "ids": list(tokens),
            "texts": list(token_texts(tokens, decode)),
            "versions": [segment.version for segment in sample.segments for _ in segment.tokens],
            "logprobs": list(logprobs),
        },
    )
