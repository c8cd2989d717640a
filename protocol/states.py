"""States of samples and groups, and the only transitions between them.

Always true: a transition that is not in `SAMPLE_TRANSITIONS` or `GROUP_TRANSITIONS` is refused, by the in-memory twin
through these tables and by the Lua scripts that are tested against them. A group's state follows from its samples'
states until it is READY; from then on delivery moves it.
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


SAMPLE_TRANSITIONS: Mapping[SampleState, frozenset[SampleState]] = {
    SampleState.QUEUED: frozenset({SampleState.RUNNING}),
    SampleState.RUNNING: frozenset({SampleState.PARKED, SampleState.FINISHED, SampleState.FAILED}),
    SampleState.PARKED: frozenset({SampleState.RUNNING}),
    SampleState.FINISHED: frozenset({SampleState.SCORED, SampleState.FAILED}),
    SampleState.SCORED: frozenset(),
    SampleState.FAILED: frozenset(),
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
