"""Only the legal ways lead from state to state, and each of them leads to a word."""

import itertools

import pytest

from launcher.base.errors import StateError
from launcher.policy.observed import RunState
from launcher.policy.plan import transition

TO_AND_FRO = ("RUNNING", "PAUSED", "REPAIRING", "RESTORING")
LEGAL = {
    "INITIALIZING": {"RUNNING", "PAUSED", "SHUTTING_DOWN"},
    "RUNNING": {*TO_AND_FRO, "SHUTTING_DOWN"},
    "PAUSED": {*TO_AND_FRO, "SHUTTING_DOWN"},
    "REPAIRING": {*TO_AND_FRO, "SHUTTING_DOWN"},
    "RESTORING": {*TO_AND_FRO, "SHUTTING_DOWN"},
    "SHUTTING_DOWN": {"FINISHED", "ERRORED", "ABORTED"},
    "FINISHED": set(),
    "ERRORED": set(),
    "ABORTED": set(),
}
"""As a person reads them in the picture of RunState (launcher/policy/observed.py)."""


@pytest.mark.parametrize(("state", "to"), list(itertools.product(RunState, RunState)))
def test_a_transition_is_made_if_the_table_has_it_and_refused_else(state, to):
    if to in LEGAL[state] or to is state:
        assert transition(state, to) is to
    else:
        with pytest.raises(StateError, match=f"{state} can't become {to}") as refused:
            transition(state, to)
        assert f"legal from {state}" in refused.value.hint


def test_a_transition_that_does_not_exist_names_those_that_do():
    with pytest.raises(StateError) as end:
        transition(RunState.FINISHED, RunState.RUNNING)
    assert end.value.hint == "legal from FINISHED: none, it is an end"
    with pytest.raises(StateError) as other:
        transition(RunState.SHUTTING_DOWN, RunState.RUNNING)
    assert other.value.hint == "legal from SHUTTING_DOWN: ABORTED, ERRORED, FINISHED"
