"""What shows that the trainer works, fails or has ended: its process and last view, the failures that its step loop
found, the end of its process. launcher/policy/trainer_liveness.py and launcher/policy/exit_cause.py judge it.

A look waits for nobody: neither a stopped trainer nor one that holds the interpreter delays it. Why a process ended is
found where it can't report that itself: from the kernel, from Ray, and from its log. An allocation that fails in a step
may fail in one of Ray's threads next, before anybody has heard of the step.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from actors.cluster.node_identity import is_here
from actors.cluster.ray_oom_kills import killed_for_memory
from actors.processes.process_tree import errors_file, process_state
from actors.serving.server_log_tail import decisive_lines, tail, words_of_abort
from launcher.base.messages import Cause, Incident, LoopFailure, ServerState, TrainerView, Verdict
from launcher.config.supervision import HealthConfig
from launcher.policy.exit_cause import ExitFinding, find_trainer_cause
from launcher.policy.trainer_liveness import (
    STEPS_KEPT,
    TrainerEvidence,
    TrainerLook,
    judge_trainer,
    observe_trainer,
)

READ_S = 2.0
"""Longest wait for a log on a disk that stalls."""
NOT_OF_THE_PROCESS = frozenset({Cause.NONFINITE, Cause.VERIFIER_BROKEN})
OF_THE_REWARD = frozenset({"RewardError", "RewardImportError"})
QUOTES_OTHERS = OF_THE_REWARD | {"RolloutError"}
"""Their messages say what a server or a reward function said: memory that ran out there is not the trainer's."""


class TrainerWatch:
    """One incarnation of the trainer at a time: another pid begins another."""

    def __init__(self, settings: HealthConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._incarnation = ("", 0)
        self._evidence: TrainerEvidence | None = None
        self._step_s: deque[float] = deque(maxlen=STEPS_KEPT)
        self._step, self._step_at = -1, 0.0

    def look(self, view: TrainerView, *, heard_at: float, is_asked: bool) -> None:
        """`heard_at`: when it gave `view`. `is_asked`: another answer has been asked for and has not come."""
        now = self._clock()
        if (view.node, view.pid) != self._incarnation:
            self._incarnation, self._evidence = (view.node, view.pid), None
            self._step_s.clear()
            self._step = -1
        self._time_steps(view, now)
        state, cpu_s = process_state(view.pid) if is_here(view.node) else (None, 0.0)
        look = TrainerLook(
            at=now,
            state=state,
            cpu_s=cpu_s,
            pinged_at=heard_at,
            ping_waits=is_asked,
            progress=view.progress,
            waits_for=waits_for(view),
            median_step_s=median(self._step_s) if self._step_s else None,
            is_at_one_thing=view.phase == "checkpoint" or (view.phase == "publish" and bool(view.loading)),
        )
        evidence = self._evidence
        self._evidence = (
            TrainerEvidence(look=look) if evidence is None else observe_trainer(evidence, look, self._settings)
        )

    def verdict(self) -> Verdict:
        return judge_trainer(self._evidence, self._settings, self._clock())

    def _time_steps(self, view: TrainerView, now: float) -> None:
        """Steps seen while it was working throughout; a pause between two of them is none of its time."""
        if waits_for(view) or view.next_step < self._step:
            self._step = -1
        elif self._step < 0:
            self._step, self._step_at = view.next_step, now
        elif view.next_step > self._step:
            self._step_s.append((now - self._step_at) / (view.next_step - self._step))
            self._step, self._step_at = view.next_step, now


def waits_for(view: TrainerView) -> str:
    """What it waits for, by order or because no server is ready; "" where it has work."""
    if view.busy:
        return view.busy  # a checkpoint or a model of any size: its order's deadline counts
    if not (view.is_running or view.is_allowed):
        return "an order"
    serves = any(
        server.state is ServerState.READY
        and server.weight_version == view.policy_version
        and server.lineage in (None, view.lineage)
        for server in view.servers
    )
    if view.phase in ("rollout", "evaluate") and not serves:
        return "a server"
    return "the monitor" if view.is_at_gate else ""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """On another node the same pid is another process."""

    node: str
    pid: int


@dataclass(frozen=True, slots=True)
class NoOrder:
    """No start is under way: what the trainer does is in its view."""


@dataclass(frozen=True, slots=True)
class StartOrdered:
    """An order to start it is under way, so that it is empty means nothing."""


@dataclass(frozen=True, slots=True)
class OrderOverdue:
    """An order was not carried out by its deadline; while it is still busy with it, or is not there, it hangs."""

    reason: str


OrderState = NoOrder | StartOrdered | OrderOverdue


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """The last process of it that has ended. `finding`: why, where more is known than that it did. `told`: why it could
    not start, in its own words."""

    process: ProcessId | None = None
    finding: ExitFinding | None = None
    told: str = ""


class TrainerFault:
    """Failures that the step loop found and that are no fault of its process: since when, and whether it may continue.
    Of one trainer over all its incarnations.

    Numbers that are not finite stay a failure until the trainer is restored; a reward function that did not answer,
    until it does.
    """

    def __init__(self) -> None:
        self._failed_since: float | None = None
        self._failed_before: tuple[Cause, int] | None = None
        self._first_failed_at = 0.0
        self._answered: tuple[Cause, int] | None = None

    def incident(self, failure: LoopFailure | None, now: float) -> Incident | None:
        cause = cause_of(failure)
        if failure is None or cause not in NOT_OF_THE_PROCESS or (cause, failure.global_step) == self._answered:
            self._failed_since = None
            return None
        if self._failed_since is None:
            again = (cause, failure.global_step) == self._failed_before
            self._failed_since = self._first_failed_at if again else now
            self._failed_before, self._first_failed_at = (cause, failure.global_step), self._failed_since
        return Incident(
            cause=cause,
            subject="trainer" if cause is Cause.NONFINITE else "reward",
            reason=failure.message,
            since=self._failed_since,
            onset_step=failure.global_step,
        )

    def reward_answers(self, failure: LoopFailure | None) -> None:
        """The step that failed for want of a reward may be tried again.

        If it fails again, that counts from the first time: a function that can't score one prompt is broken too.
        """
        if failure is not None and cause_of(failure) is Cause.VERIFIER_BROKEN:
            self._answered = (Cause.VERIFIER_BROKEN, failure.global_step)

    def resumed(self) -> None:
        """What fails from now on is another failure."""
        self._answered = None


def cause_of(failure: LoopFailure | None) -> Cause | None:
    if failure is None:
        return None
    return Cause.VERIFIER_BROKEN if failure.kind in OF_THE_REWARD else finding_of(failure).cause


def finding_of(failure: LoopFailure) -> ExitFinding:
    """What the loop's error says of the trainer itself."""
    is_own = failure.kind not in QUOTES_OTHERS
    said = [f"{failure.kind}: {failure.message}".replace("\n", " ")] if is_own else []
    return find_trainer_cause(said, None)


class TrainerExit:
    """Why a process of this machine, alive yet, will have ended. `log`: the trainer's."""

    def __init__(self, process: ProcessId, log: Path) -> None:
        self._process, self._log = process, log
        self._errors = errors_file(process.pid)

    async def find(self, oom_kills: int, *, since: int) -> ExitFinding:
        """Once it has ended. `oom_kills`: by the kernel, meanwhile. `since`: the byte of the log up to which all was
        well."""
        if oom_kills:
            return find_trainer_cause([], -signal.SIGKILL, oom_kills=oom_kills)
        killed = (await killed_for_memory(self._process.node, self._process.pid)).splitlines()
        said = await read_log(lambda: f"{tail(self._log, since)}\n{words_of_abort(self._errors)}")
        return find_trainer_cause([*killed, *decisive_lines(said)], None)


async def read_log(said: Callable[[], str]) -> str:
    """What `said` reads, on a thread; "" where the disk doesn't give it within READ_S."""
    try:
        async with asyncio.timeout(READ_S):
            return await asyncio.to_thread(said)
    except TimeoutError:
        return ""
