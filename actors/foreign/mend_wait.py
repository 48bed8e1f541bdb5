"""Waits while what scores another project's trainer is at fault, and not its weights (P12): a person mends that, and
the run goes on by itself. The trainer is stopped meanwhile, nothing is condemned, no budget of restarts is spent.

With `trainer.reward_check` that command says when it is mended. Else the trainer is started again, from the newest
state that was sound, after longer and longer waits, and its first step decides. `run_control resume` ends any wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from actors.foreign.foreign_checkpoints import ForeignCheckpoints
from actors.foreign.foreign_faults import DOING, TRAINER, OutsideWeights
from actors.foreign.foreign_process import within
from actors.foreign.foreign_steps import ForeignSteps
from actors.foreign.reward_check import KEY, Objection, objection
from actors.supervision.incident_tracker import IncidentTracker
from actors.supervision.run_history import RunHistory
from launcher.adapters.foreign_health import unproven_of
from launcher.adapters.trainer_adapter import TrainerAdapter
from launcher.base.errors import RunError, StorageError
from launcher.base.messages import Cause
from launcher.config.schema import RunConfig
from launcher.policy.incident_policy import OF_THE_MONITOR, REWARD, SUBJECT_OF, Ending, OpenIncident, Trouble
from launcher.policy.observed import RunState
from launcher.run_files.control_requests import ControlRequest, RequestEntry, wanted
from launcher.run_files.journal import number_of
from launcher.run_files.run_paths import RunPaths

CHECK_EVERY_S, LOOK_S = 10.0, 0.5
"""Between two checks of a reward function that is broken, and two looks at what a person asks for."""
WAITS = "rewards.awaited"


class MendWait:
    """`asked`: set once the end of the run is asked for, which ends each wait. `variables`: what the trainer is given,
    which its check is given too."""

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        adapter: TrainerAdapter,
        history: RunHistory,
        incidents: IncidentTracker,
        steps: ForeignSteps,
        checkpoints: ForeignCheckpoints,
        asked: asyncio.Event,
        clock: Callable[[], float],
        variables: Mapping[str, str],
    ) -> None:
        self._config = config
        self._paths = paths
        self._adapter = adapter
        self._history = history
        self._incidents = incidents
        self._steps = steps
        self._checkpoints = checkpoints
        self._asked = asked
        self._clock = clock
        self._variables = variables
        self._heard_at = 0.0

    def onset_after(self, step: int) -> int | None:
        """Since when rewards are low, by the open incidents, else by what the attempt before has left; None: they
        aren't, or were already at `step`. The first steps after it then show whether the weights were the cause."""
        lines = [line for one in self._open.values() for line in self._history.incidents.lines[one.number]]
        unproven = self._checkpoints.unproven
        onset_step = next((onset for line in lines if isinstance(onset := line.get("onset_step"), int)), None)
        if onset_step is None and unproven is not None:
            onset_step = unproven.onset_step
        return onset_step if onset_step is not None and step < onset_step else None

    @property
    def _open(self) -> dict[str, OpenIncident]:
        return {one.subject: one for one in self._history.incidents.open.values() if one.subject in OF_THE_MONITOR}

    async def started(self) -> None:
        """The trainer starts: what a person has asked for until now is done."""
        if (found := await asyncio.to_thread(self._wanted)) is not None:
            self._heard_at = found.at

    async def check_first(self) -> None:
        """Before the first start of an attempt. Raises RunError."""
        if (found := await self._objection()) is not None:
            raise RunError(f"{found.why}; the trainer was not started", "mend the reward function, or the check")

    async def accuse(self, reason: str, onset_step: int | None) -> None:
        """Rewards fell. Raises OutsideWeights where the reward function fails its check. Where the check could not be
        run to its end, the first steps after a restore have to tell."""
        if onset_step is None or (found := await self._objection()) is None:
            return
        if not found.is_known:
            unknown = f"{found.why}; it is not known whether the reward function is at fault: check {KEY}"
            self._history.event("trainer.unwatched", subject=TRAINER, reason=unknown)
            return
        facts: dict[str, object] = {"onset_step": onset_step, "global_step": onset_step - 1}
        self._history.event("health.verifier_broken", subject=REWARD, reason=found.why, **facts)
        raise OutsideWeights(f"{found.why}; {reason}", onset_step=onset_step, cause=Cause.VERIFIER_BROKEN)

    def resumed(self) -> None:
        """A supervisor takes over from one that had started something. Raises OutsideWeights where it was waiting."""
        if (unproven := self._checkpoints.unproven) is not None and unproven.is_contradicted:
            cause = Cause.VERIFIER_BROKEN if REWARD in self._open else Cause.OUTSIDE_WEIGHTS
            raise OutsideWeights(unproven.why, onset_step=unproven.onset_step, cause=cause)

    async def wait(self, error: OutsideWeights) -> None:
        """Until the trainer, which has been stopped, is to be tried again. Raises OutsideWeights, in the end."""
        await self._history.flush()
        self._checkpoints.unproven = unproven_of(self._history.command_events)
        if error.cause is Cause.OUTSIDE_WEIGHTS:
            await asyncio.to_thread(self._steps.withdraw, self._history.command_events)
            await self._checkpoints.put_back()
            if (found := await self._objection()) is not None and found.is_known:
                reason = f"{found.why}; {error.message}"
                error = OutsideWeights(reason, onset_step=error.onset_step, cause=Cause.VERIFIER_BROKEN)
        subject, now = SUBJECT_OF[error.cause], self._clock()
        others = [one for one in self._open.values() if one.subject != subject]
        if subject not in self._open:
            trouble = Trouble(cause=error.cause, subject=subject, reason=error.message, onset_step=error.onset_step)
            self._incidents.opened(trouble, DOING[error.cause], now)
        reason = f"the weights are not what changed; see the incident of the {subject}"
        self._incidents.ended([Ending(incident=one, reason=reason, is_mended=False) for one in others], now)
        await self._until_next_try(self._open[subject], error)

    async def _until_next_try(self, one: OpenIncident, error: OutsideWeights) -> None:
        """`one`: the incident of this wait, whose events say how often it was tried."""
        settings, history = self._config.reward_health, self._history
        waits = [event for event in history.incidents.lines[one.number] if event.get("event") == WAITS]
        tried = len(waits)
        if waits and not self._heard_at:  # a supervisor that was killed has heard it
            self._heard_at = number_of(waits[-1].get("heard_at"), 0.0)
        give_up_at = one.since + settings.mend_patience_s
        left, has_check = give_up_at - self._clock(), one.cause is Cause.VERIFIER_BROKEN
        if left <= 0:
            raise self._given_up(error)
        wait_s = CHECK_EVERY_S if has_check else min(settings.mend_wait_s * 2.0 ** min(tried, 30), left)
        how = "trainer.reward_check is asked again every" if has_check else "the trainer is started again in"
        reason = f"{how} {wait_s:.3g} s, and at once after `run_control resume`; given up in {left:.0f} s"
        history.event(WAITS, subject=one.subject, reason=reason, seconds=wait_s, heard_at=self._heard_at)
        history.enter(RunState.PAUSED, f"it waits for its rewards to be mended: {reason}")
        why, by_itself = "", "as trainer.reward_check passes" if has_check else f"after {wait_s:.3g} s"
        while not self._asked.is_set():
            who = await self._resumed_within(wait_s)
            why = who or by_itself
            if not has_check or (found := await self._objection()) is None:
                break
            if self._clock() >= give_up_at:
                raise self._given_up(error)
            if who:
                reason = f"{found.why}; {how} {wait_s:.3g} s"
                history.event(WAITS, subject=one.subject, reason=reason, seconds=wait_s, heard_at=self._heard_at)
        if not self._asked.is_set():
            history.enter(RunState.REPAIRING, f"the trainer is started again {why}")

    def _given_up(self, error: OutsideWeights) -> OutsideWeights:
        waited = f"reward_health.mend_patience_s={self._config.reward_health.mend_patience_s:g}"
        reason = f"{error.message}; it was not mended within {waited}"
        return OutsideWeights(reason, onset_step=error.onset_step, cause=error.cause)

    async def _resumed_within(self, seconds: float) -> str:
        """Who asked meanwhile that the run resumes; "" where nobody did."""
        until = self._clock() + seconds
        while not self._asked.is_set() and (left := until - self._clock()) > 0:
            found = await asyncio.to_thread(self._wanted)
            if found is not None and found.at != self._heard_at:
                self._heard_at = found.at
                if found.wish is ControlRequest.RUN:
                    return f"as {found.description}"
            await within(min(left, LOOK_S), self._asked)
        return ""

    async def _objection(self) -> Objection | None:
        return await objection(self._config, self._paths, self._adapter, self._asked, self._variables)

    def _wanted(self) -> RequestEntry | None:
        with contextlib.suppress(StorageError):  # asked again at the next look
            return wanted(self._paths)
        return None
