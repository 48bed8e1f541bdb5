"""The Coordinator: observe → plan → perform → record, until the run has ended. The only writer of RunState.

`Coordinator` is the plain class, with a `ClusterInterface` to see and act through; `CoordinatorActor` is the Ray actor
around it. It decides nothing itself (launcher/policy/plan.py does), and what it must remember is in memory.json
before it acts: one that was killed is replaced by one that reads this file, observes what runs, and continues.

Consumes: `abort`, `hold`, `resize`, `restore`. Waits for: the cluster's `changed`, a plan's `wake_at`, at most a turn.
Unblocked by: any of these; no action is waited for, each runs as a task with its own deadline.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from actors.supervision.incident_artifacts import ArtifactCollector
from actors.supervision.incident_tracker import IncidentTracker
from actors.supervision.run_history import RunHistory, server_names
from launcher.base.errors import LauncherError
from launcher.base.messages import Health, RunOutcome, TerminalStatus
from launcher.config.schema import RunConfig
from launcher.policy.actions import Action, Halt, PauseTrainer, RestoreTrainer
from launcher.policy.observed import ENDS, Observed, RecoveryPlan, RunState
from launcher.policy.plan import plan
from launcher.policy.restart_budget import wait_s
from launcher.policy.standstill import StandstillClock
from launcher.policy.trainer_liveness import StepClock

Facts = Mapping[str, object]
"""Figures for the journal."""
TURN_S = 0.25
"""Between two looks at what time alone changes: a deadline, a doubt."""
QUIET_TURN_S = 1.0
"""The same while the run steps and nobody is in doubt: what changes then is told (`ClusterInterface.changed`)."""


class ClusterInterface(Protocol):
    """How the Coordinator observes and acts. Behind it are Ray, processes and disks
    (actors/supervision/action_executor.py); a test puts a model of a run there.

    `changed` is set whenever an observation would show something that should not wait for the next turn."""

    changed: asyncio.Event

    async def begin(self) -> None:
        """Adopt what runs, start what was never started, and return without waiting for it to be ready."""

    async def observe_run(self, *, with_checkpoints: bool = False) -> Observed:
        """What is known now; the Coordinator adds what it remembers. `checkpoints` is None where they are not asked
        for, or can't be read now."""

    def deadline_s(self, action: Action) -> float:
        """Within which `perform` must have ended."""

    async def perform(self, action: Action) -> Facts:
        """Do it, and return figures for the journal. Raises LauncherError."""

    async def close(self) -> None:
        """Stop watching. Servers and trainer continue."""


class Coordinator:
    """Used on one asyncio loop. `clock` gives seconds that all processes of this host share."""

    def __init__(
        self,
        config: RunConfig,
        cluster: ClusterInterface,
        history: RunHistory,
        *,
        clock: Callable[[], float] = time.monotonic,
        artifacts: ArtifactCollector | None = None,
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._history = history
        self._clock = clock
        self._artifacts = artifacts
        self._incidents = IncidentTracker(history, artifacts)
        self._under_way: dict[asyncio.Task[None], Action] = {}
        self._failures: dict[tuple[type[Action], str], list[float]] = {}
        self._steps = StepClock(config.health)
        self._standstill = StandstillClock()
        self._asked_restore: RestoreTrainer | None = None

    async def run(self) -> RunOutcome:
        """Until the run has ended. Raises what is a defect of the launcher's own, and StateError."""
        if self._history.memory.was_begun:
            self._history.adopt(f"a run that is {self._history.state}")
        else:
            self._history.begin()
        self._incidents.begin()
        return await self.supervise()

    async def supervise(self) -> RunOutcome:
        """Of a run that has begun."""
        await self._cluster.begin()
        try:
            while self._history.state not in ENDS:
                await self._wait(await self.turn())
            self._incidents.close(self._clock())
            return self._outcome(await self._cluster.observe_run())
        finally:
            await self._drop_tasks()
            await self._cluster.close()
            if self._artifacts is not None:
                await self._artifacts.close()
            await self._history.flush_in_time()

    def abort(self, reason: str) -> None:
        """End the run, saving what there is. Asking twice changes nothing."""
        self._history.asked_to_abort(reason)
        self._cluster.changed.set()

    def resize(self, servers: int, reason: str) -> None:
        """There are to be so many servers from now on. Asking twice changes nothing; a run that is ending stays as it
        is."""
        memory = self._history.memory
        is_ending = self._history.state in ENDS or memory.ending is not None or bool(memory.abort_reason)
        if servers != (memory.servers or self._config.sglang.n_servers) and not is_ending:
            self._history.asked_to_resize(servers, reason)
            self._cluster.changed.set()

    def hold(self, reason: str) -> None:
        """Pause the trainer until this is asked with "". Asking twice changes nothing."""
        if reason != self._history.memory.hold_reason:
            self._history.asked_to_hold(reason)
            self._cluster.changed.set()

    def restore(self, asked: RestoreTrainer | None) -> None:
        """What a person wants restored, as its file says now; None: nothing, or no longer."""
        # Its file may have been read a moment before it was removed.
        is_done = asked is not None and (asked.restore_count or 0) <= self._history.memory.restore_taken
        if not is_done and asked != self._asked_restore:
            self._asked_restore = asked
            self._cluster.changed.set()

    async def turn(self) -> float:
        """One look, one plan, its actions begun. Returns when to look again at the latest."""
        for with_checkpoints in (False, True):  # the disk is read only for a plan that needs it
            look = await self._cluster.observe_run(with_checkpoints=with_checkpoints)
            self._reap()
            now = self._clock()
            seen = self._observe(look)
            is_restoring = any(isinstance(action, RestoreTrainer) for action in seen.under_way)
            if not is_restoring and self._history.memory.has_lost_a_restore(seen.trainer):
                self._history.lost_restore()
            seen = dataclasses.replace(seen, standstill_s=self._standstill.note(seen, now))
            made = plan(seen, self._history.attempts, self._config, now)
            if not made.needs_checkpoints:
                break
        self._incidents.turn(seen, made, now)
        self._enter(made)
        self._note_late_step(seen, made, now)
        for attempt in made.attempts:
            self._history.attempted(attempt)
        for action in made.actions:
            self._history.begun(action)
            self._under_way[asyncio.create_task(self._perform(action))] = action
        turn_s = QUIET_TURN_S if self._is_quiet(seen, made) else TURN_S
        return now + turn_s if made.wake_at is None else min(now + turn_s, made.wake_at)

    def _is_quiet(self, seen: Observed, made: RecoveryPlan) -> bool:
        verdicts = (seen.trainer.verdict, *(server.verdict for server in seen.servers))
        is_in_doubt = any(verdict.health in (Health.SUSPECT, Health.DEAD) for verdict in verdicts)
        return made.state is RunState.RUNNING and not (self._under_way or is_in_doubt or seen.incident or seen.disk)

    def _note_late_step(self, seen: Observed, made: RecoveryPlan, now: float) -> None:
        is_working = made.state is RunState.RUNNING and not seen.trainer.is_evaluating and not seen.hold_reason
        told = self._steps.note(seen.trainer.next_step, is_working=is_working, now=now)
        if told and self._steps.is_late:
            doubts = [f"{s.name}: {s.verdict.reason}" for s in seen.servers if s.verdict.health is not Health.HEALTHY]
            self._history.event("step.late", subject="trainer", reason="; ".join([told, *doubts]))
        elif told:
            self._history.event("step.came", subject="trainer", reason=told)

    def _enter(self, made: RecoveryPlan) -> None:
        self._history.enter(made.state, made.reason)

    def _observe(self, look: Observed) -> Observed:
        memory = self._history.memory
        fleet = server_names(memory.servers or self._config.sglang.n_servers)
        return dataclasses.replace(
            look,
            state=self._history.state,
            under_way=tuple(self._under_way.values()),
            tried=tuple(memory.tried),
            hold_reason=memory.hold_reason,
            abort_reason=memory.abort_reason,
            asked_restore=self._asked_restore,
            ending=memory.ending,
            reinstate_after=memory.reinstate_after,
            fleet=fleet,
            newcomers=frozenset(fleet) - memory.served,
            not_before={
                key: times[-1] + wait_s(len(times), self._config.restart) for key, times in self._failures.items()
            },
        )

    async def _perform(self, action: Action) -> None:
        """To its end, however it ends; a failed one is due again, and the plan counts how often."""
        started, deadline_s = self._clock(), self._cluster.deadline_s(action)
        try:
            if self._artifacts is not None:
                await self._artifacts.evidence_before(action)
            async with asyncio.timeout(deadline_s):
                await self._flush_before(action)
                facts = await self._cluster.perform(action)
        except TimeoutError:
            self._failed(action, f"not done within {deadline_s:g} s", started)
        except LauncherError as error:
            self._failed(action, error.message, started)
        except OSError as error:  # a disk that refuses a file of the Coordinator's own
            self._failed(action, f"{type(error).__name__}: {error}", started)
        else:
            if isinstance(action, RestoreTrainer) and action.restore_count is not None:
                self._asked_restore = None
            self._failures.pop(_key(action), None)
            self._history.done(action, facts, self._clock() - started)
        finally:
            self._cluster.changed.set()

    async def _flush_before(self, action: Action) -> None:
        """That it was begun is on the disk first: a Coordinator that takes over must know. A pause and a halt, which it
        would only order again, do not wait for a disk that stalls, or is full: the run could not even be ended. Raises
        RunError."""
        if not isinstance(action, Halt | PauseTrainer):
            await self._secure()
            return
        await self._history.flush_in_time()

    async def _secure(self) -> None:
        await self._history.secure()

    def _failed(self, action: Action, reason: str, started: float) -> None:
        """It is due again after a wait that doubles with each failure; a halt is never waited for. After
        restart.window_s without one the earlier are forgotten: it may never have succeeded, as no one needed it."""
        now = self._clock()
        if not isinstance(action, Halt):
            times = self._failures.setdefault(_key(action), [])
            if times and now - times[-1] > self._config.restart.window_s:
                times.clear()
            times.append(now)
        self._history.failed(action, reason, now - started)

    def _reap(self) -> None:
        """Forget what has ended. An error that `_perform` did not expect is a defect, and raised here."""
        for task in [task for task in self._under_way if task.done()]:
            del self._under_way[task]
            task.result()

    async def _wait(self, wake_at: float) -> None:
        try:
            async with asyncio.timeout(max(wake_at - self._clock(), 0.0)):
                await self._cluster.changed.wait()
        except TimeoutError:
            return
        self._cluster.changed.clear()

    async def _drop_tasks(self) -> None:
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    def _outcome(self, look: Observed) -> RunOutcome:
        last_step = look.trainer.next_step - 1
        return RunOutcome(
            status=TerminalStatus(self._history.state),
            reason=self._history.memory.ending_reason,
            last_step=last_step if last_step >= 0 else None,
            may_pass=self._history.memory.ending_may_pass,
            evals=look.evals,
        )


def _key(action: Action) -> tuple[type[Action], str]:
    return type(action), getattr(action, "name", "")
