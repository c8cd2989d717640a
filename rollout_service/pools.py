"""Over-provisioning inside a group (`rollout.samples_ratio`), as the round loop sees it.

Always true: a group starts n' samples and wants n; what it parts with is the buffer's to keep. A pooled sample goes on
only where the scheduler says that its oldest token can still be trained within `max_lag`. With
`rollout.allow_epoch_lag` they all do: tokens of an earlier epoch have no deadline, and a group is as old as what
it writes itself.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence

from buffer.interface import ContinuationBuffer, NewGroup, Snapshot
from protocol.messages import LengthBias
from protocol.samples import Group, Prompt, Sample
from protocol.settings import RunSettings
from protocol.states import SampleState
from rollout_service.scheduler.decisions import RoundLimits

log = logging.getLogger(__name__)


class PooledSamples:
    """For the round loop, which admits groups and learns of new policy versions."""

    def __init__(self, settings: RunSettings, buffer: ContinuationBuffer) -> None:
        self._buffer = buffer
        self._max_lag = settings.rollout.max_lag
        self._any_age = settings.rollout.allow_epoch_lag
        self._cleared_at: int | None = None
        if settings.rollout.samples_ratio > 1:
            log.warning(
                "rollout.samples_ratio = %g: the fastest samples of a prompt are trained on first, which favours short "
                "responses; watch length_bias in /v1/status (docs/samples_ratio.md)",
                settings.rollout.samples_ratio,
            )

    def new_groups(self, prompts: Iterable[Prompt], limits: RoundLimits, oldest_version: int) -> list[NewGroup]:
        """What to admit of these prompts."""
        oldest = None if self._any_age else oldest_version
        return [NewGroup(p, limits.started_samples, limits.group_samples, oldest) for p in prompts]

    def age_of(self, group: Group) -> int | None:
        """The version of the oldest token that a new group must be trained in time for; None if it has none."""
        if self._any_age:
            return None
        return min((segment.version for sample in group.samples for segment in sample.segments), default=None)

    async def clear(self, snapshot: Snapshot) -> None:
        """Once a version: what can't go on any more expires, and so does what never had a token."""
        if snapshot.active_version == self._cleared_at or not snapshot.samples.get(SampleState.POOLED):
            return
        self._cleared_at = snapshot.active_version
        before = 0 if self._any_age else max(0, snapshot.active_version - self._max_lag)
        if expired := await self._buffer.expire_pooled(before):
            log.info("%d pooled samples can't go on any more, with version %d", expired, snapshot.active_version)


def waiting_of(group: Group) -> list[tuple[str, int]]:
    """(id, index) of a new group's samples that are to run."""
    return [(s.sample_id, s.index) for s in group.samples if s.state is not SampleState.FINISHED]


def unscored_of(group: Group) -> list[Sample]:
    """Samples of a new group that had finished before their first group was READY."""
    return [s for s in group.samples if s.state is SampleState.FINISHED]


def begun_of(groups: Sequence[Group]) -> list[tuple[str, int]]:
    """(id, tokens) of new groups' samples that go on."""
    return [(s.sample_id, s.num_tokens) for g in groups for s in g.samples if s.state is SampleState.PARKED]


def length_bias(counters: Mapping[str, int]) -> LengthBias | None:
    """From the buffer's counts of groups that started more samples than they wanted; None before the first."""
    trained, left = (counters.get(f"raced_samples_{outcome}", 0) for outcome in ("trained", "left"))
    if not trained:
        return None
    tokens, more = (counters.get(f"raced_tokens_{outcome}", 0) for outcome in ("trained", "left"))
    return LengthBias(trained_tokens=tokens / trained, started_tokens=(tokens + more) / (trained + left))
