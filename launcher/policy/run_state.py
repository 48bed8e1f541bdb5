"""The states of a run and the legal ways between them.

    INITIALIZING ──► RUNNING ◄──► REPAIRING ◄──► RESTORING ◄──► PAUSED   (each of the last four to each other)
         │              │              │              │            │
         └──────────────┴──────────────┴──────────────┴────────────┴──► SHUTTING_DOWN ──► FINISHED | ERRORED | ABORTED

INITIALIZING lasts until the trainer steps for the first time, or could and is held: a pause that was asked for before
the first step leads to PAUSED. Every run ends with a status (P9), and only through SHUTTING_DOWN, so that nothing is
left running when it is reported.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from launcher.base.errors import StateError
from launcher.base.messages import TerminalStatus


class RunState(enum.StrEnum):
    INITIALIZING = "INITIALIZING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    REPAIRING = "REPAIRING"
    RESTORING = "RESTORING"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    FINISHED = "FINISHED"
    ERRORED = "ERRORED"
    ABORTED = "ABORTED"


ENDS = frozenset(RunState(status) for status in TerminalStatus)
LIVING = frozenset({RunState.RUNNING, RunState.PAUSED, RunState.REPAIRING, RunState.RESTORING})

TRANSITIONS: Mapping[RunState, frozenset[RunState]] = {
    RunState.INITIALIZING: frozenset({RunState.RUNNING, RunState.PAUSED, RunState.SHUTTING_DOWN}),
    **{state: LIVING - {state} | {RunState.SHUTTING_DOWN} for state in LIVING},
    RunState.SHUTTING_DOWN: ENDS,
    **{state: frozenset() for state in ENDS},
}
"""From each state to which. To stay is always legal, and no transition."""


def transition(state: RunState, to: RunState) -> RunState:
    """`to`, where the table has it. Raises StateError."""
    if to is state or to in TRANSITIONS[state]:
        return to
    legal = ", ".join(sorted(TRANSITIONS[state])) or "none, it is an end"
    raise StateError(f"a run that is {state} can't become {to}", f"legal from {state}: {legal}")
