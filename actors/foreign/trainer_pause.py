"""Whether another project's trainer waits for the end of a pause, as it reports itself.

    run_control pause ─► request.json ─► the trainer reads it between two steps ─► {"grpo_paused": true} ─► PAUSED

The trainer reads the request itself (launcher/adapters/trainer_callback.py): the supervisor has no way to reach it. A
trainer that can wait reports `false` when it begins; one that never has can't be paused.
"""

from __future__ import annotations

from actors.supervision.run_history import RunHistory
from launcher.base.errors import RunError
from launcher.policy.observed import RunState


class TrainerPause:
    """`waits_for`: the pause that the trainer waits in, "" while it is in none."""

    def __init__(self, history: RunHistory) -> None:
        self._history = history
        self._reason = ""
        self._state_before = RunState.RUNNING
        self.begin()

    def begin(self) -> None:
        """Another incarnation of the trainer starts."""
        self._is_obeyed = False
        self.waits_for = ""

    def ask(self, reason: str, *, steps: bool) -> None:
        """ "": no pause is wanted. `steps`: it has reported a step. Raises RunError where it can't be paused."""
        self._reason = reason
        if reason and steps and not self._is_obeyed:
            raise RunError(
                "this trainer can't be paused: it has not reported that it waits for the end of a pause",
                "give it the LauncherCallback (launcher/adapters/trainer_callback.py), or stop the run, which resumes "
                "from its checkpoint",
            )

    def take(self, is_paused: bool) -> None:
        """What it reported."""
        self._is_obeyed = True
        if is_paused and not self.waits_for:
            self.waits_for = self._reason or "a pause"
            self._state_before = self._history.state
            self._history.enter(RunState.PAUSED, self.waits_for)
        elif not is_paused and self.waits_for:
            self.waits_for = ""
            before = self._state_before  # of a repair: it is over with the next step, and not before
            state = RunState.RUNNING if before is RunState.INITIALIZING else before
            self._history.enter(state, "the pause is over")
