"""States of samples and groups, and the only transitions between them.

Always true: a transition that is not in `SAMPLE_TRANSITIONS` or `GROUP_TRANSITIONS` is refused, by the in-memory twin
through these tables and by the Lua scripts that are tested against them. A group's state follows from its samples'
states until it is READY; from then on delivery moves it. A POOLED sample is in no group: it belongs to its prompt, and
goes on, under a new id, as a sample of a later group of that prompt.
"""

from collections.abc import Mapping
from enum import StrEnum

from protocol.errors import TransitionError


class SampleState(StrEnum):
    """Where one response is in its life."""

    QUEUED = "queued"
    RUNNING = "running"
    PARKED = "parked"
    FINISHED = "finished"
    SCORED = "scored"
    FAILED = "failed"
    POOLED = "pooled"


class GroupState(StrEnum):
    """Where the n samples of one prompt are, as a whole."""

    OPEN = "open"
    READY = "ready"
    LEASED = "leased"
    CONSUMED = "consumed"
    DROPPED = "dropped"


class FinishReason(StrEnum):
    """Why a response ended by itself."""

    STOP = "stop"
    LENGTH = "length"


class FailReason(StrEnum):
    """Why a sample is FAILED; a label of metrics, so the set is closed."""

    ENGINE_ERROR = "engine_error"
    ENGINE_DIED = "engine_died"
    REWARD_TIMEOUT = "reward_timeout"
    REWARD_ERROR = "reward_error"
    REWARD_NOT_FINITE = "reward_not_finite"
    LEASE_EXPIRED = "lease_expired"
    PROMPT_TOO_LONG = "prompt_too_long"


class DropReason(StrEnum):
    """Why a group is DROPPED; a label of metrics, so the set is closed."""

    TOO_FEW_SAMPLES = "too_few_samples"
    FILTERED = "filtered"
    STALE = "stale"
    QUARANTINED = "quarantined"
    OPERATOR = "operator"


class ExpiryReason(StrEnum):
    """Why a POOLED sample is given up; a label of metrics, so the set is closed."""

    EMPTY = "empty"
    STALE = "stale"
    FULL = "full"


SAMPLE_TRANSITIONS: Mapping[SampleState, frozenset[SampleState]] = {
    SampleState.QUEUED: frozenset({SampleState.RUNNING, SampleState.POOLED}),
    SampleState.RUNNING: frozenset({SampleState.PARKED, SampleState.FINISHED, SampleState.FAILED, SampleState.POOLED}),
    SampleState.PARKED: frozenset({SampleState.RUNNING, SampleState.POOLED}),
    SampleState.FINISHED: frozenset({SampleState.SCORED, SampleState.FAILED, SampleState.POOLED}),
    SampleState.SCORED: frozenset(),
    SampleState.FAILED: frozenset(),
    SampleState.POOLED: frozenset({SampleState.PARKED, SampleState.FINISHED}),
}

GROUP_TRANSITIONS: Mapping[GroupState, frozenset[GroupState]] = {
    GroupState.OPEN: frozenset({GroupState.READY, GroupState.DROPPED}),
    GroupState.READY: frozenset({GroupState.LEASED, GroupState.DROPPED}),
    GroupState.LEASED: frozenset({GroupState.CONSUMED}),
    GroupState.CONSUMED: frozenset(),
    GroupState.DROPPED: frozenset(),
}

TERMINAL_SAMPLE_STATES = frozenset({SampleState.SCORED, SampleState.FAILED})


def check_sample_transition(sample_id: str, old: SampleState, new: SampleState) -> None:
    """Raise `TransitionError` unless a sample may go from `old` to `new`."""
    if new not in SAMPLE_TRANSITIONS[old]:
        raise TransitionError(f"sample {sample_id} is {old} and can't become {new}")


def check_group_transition(group_id: str, old: GroupState, new: GroupState) -> None:
    """Raise `TransitionError` unless a group may go from `old` to `new`."""
    if new not in GROUP_TRANSITIONS[old]:
        raise TransitionError(f"group {group_id} is {old} and can't become {new}")
