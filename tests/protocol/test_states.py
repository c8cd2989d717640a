"""The state machines: what is reachable, what is final."""

import pytest

from protocol.errors import TransitionError
from protocol.states import (
    GROUP_TRANSITIONS,
    SAMPLE_TRANSITIONS,
    TERMINAL_SAMPLE_STATES,
    GroupState,
    SampleState,
    check_group_transition,
    check_sample_transition,
)


@pytest.mark.parametrize(
    ("table", "first"), [(SAMPLE_TRANSITIONS, SampleState.QUEUED), (GROUP_TRANSITIONS, GroupState.OPEN)]
)
def test_every_state_is_reachable(table, first):
    reached, new = {first}, {first}
    while new:
        new = {n for s in new for n in table[s]} - reached
        reached |= new
    assert reached == set(table)


def test_terminal_states_are_final():
    assert {s for s, nexts in SAMPLE_TRANSITIONS.items() if not nexts} == TERMINAL_SAMPLE_STATES


def test_what_is_not_in_the_tables_is_refused():
    check_sample_transition("s", SampleState.PARKED, SampleState.RUNNING)
    with pytest.raises(TransitionError, match="sample s is parked and can't become scored"):
        check_sample_transition("s", SampleState.PARKED, SampleState.SCORED)
    with pytest.raises(TransitionError, match="group g is leased and can't become dropped"):
        check_group_transition("g", GroupState.LEASED, GroupState.DROPPED)
