"""Supervises one run of another project's trainer, from its first start to the outcome.

    start ─► watch ─► exit code 0 ───────────────────────────────────────► FINISHED
      ▲        ├────► ended otherwise, hung: the newest whole checkpoint ─┐
      │        ├────► rewards fell, not finite: one from before the onset ┤ ─► budget spent ─► ERRORED
      │        ├────► the weights are not the cause: wait for a mend ─────┤
      └────────┼──────────────────────────────────────────────────────────┘
               └────► asked to stop ─────────────────────────────────────► ABORTED

Each decision is a policy's: launcher/policy/{trainer_liveness, reward_health, restore, restart_budget}.py. What was
decided is in the run's memory (RunHistory): an actor that replaces a killed one reads it and continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from actors.foreign.foreign_checkpoints import ForeignCheckpoints
from actors.foreign.foreign_faults import DOING, TRAINER, ForeignFault, OutsideWeights, fault_of_end, last_words
from actors.foreign.foreign_learning import LearningWatch
from actors.foreign.foreign_process import TreeWatch, kill, start, within
from actors.foreign.foreign_progress import ProgressWatch
from actors.foreign.foreign_steps import ForeignSteps
from actors.foreign.mend_wait import MendWait
from actors.foreign.step_doubts import StepDoubts
from actors.foreign.step_source import StepSource
from actors.foreign.trainer_pause import TrainerPause
from actors.processes.hosted_process import Ended, HostedProcess
from actors.processes.process_tree import Process
from actors.supervision.coordinator import FLUSH_S
from actors.supervision.incident_artifacts import EVIDENCE_S, ArtifactCollector
from actors.supervision.incident_tracker import IncidentTracker
from actors.supervision.run_history import ProgressTracker, RunHistory, furthest_step
from launcher.adapters.foreign_health import unproven_of, was_started
from launcher.adapters.trainer_adapter import StepSeen, adapter_of
from launcher.base.errors import RunError, ServerError
from launcher.base.messages import Cause, Health, RunOutcome, TerminalStatus
from launcher.config.schema import RunConfig
from launcher.policy.actions import Halt
from launcher.policy.incident_policy import OF_LEARNING, Ending
from launcher.policy.observed import RunState
from launcher.policy.restart_budget import Rung
from launcher.policy.restore import FIRST_WEIGHTS
from launcher.run_files.control_requests import FILE
from launcher.run_files.journal import Journal, number_of
from launcher.run_files.run_paths import RunPaths

SUPERVISOR_LOST = "the actor that ran it ended, and the command with it"
STEPS, REQUESTS = "GRPO_TRAINER_STEPS", "GRPO_TRAINER_REQUESTS"
Made = TypeVar("Made")


class ForeignSupervisor:
    """`run` once. `waits_for`: what the command waits for that is not its own; "" where nothing is. `pause`: that which
    a person asked for."""

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        journal: Journal,
        history: RunHistory,
        variables: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError, JournalError."""
        self._config = config
        self._paths = paths
        self._journal = journal
        self._history = history
        self._variables = variables
        self._clock = clock
        self._adapter = adapter_of(config.trainer)
        self.steps = ForeignSteps(paths, journal.attempt, history.command_events)
        self._progress = ProgressTracker(history, furthest_step(paths.metrics, journal.attempt))
        self._asked = asyncio.Event()
        self._checkpoints = ForeignCheckpoints(
            config,
            self._adapter,
            history,
            are_ours=was_started(history.command_events),
            unproven=unproven_of(history.command_events),
            paths=paths,
            asked=self._asked,
        )
        self._artifacts = ArtifactCollector(paths, pids=lambda: {TRAINER: self.pid} if self.pid else {})
        self._incidents = IncidentTracker(history, self._artifacts)
        shared = (self._adapter, history, self._incidents, self.steps, self._checkpoints)
        self._mend = MendWait(config, paths, *shared, self._asked, clock, variables)
        self._process: HostedProcess | None = None
        self._source = StepSource(self._adapter, paths.trainer_log)
        self._learning = LearningWatch(config.reward_health, history)
        self._doubts = StepDoubts(history, self._adapter.reads)
        self.pause = TrainerPause(history)
        self.waits_for: Callable[[], str] = str
        self.since = clock()

    @property
    def pid(self) -> int:
        """Of the command, 0 where none runs."""
        return 0 if self._process is None or self._process.ended is not None else self._process.pid

    # ── what a person may ask ──

    def abort(self, reason: str) -> None:
        self._history.asked_to_abort(reason)
        self._asked.set()

    def hold(self, reason: str) -> None:
        """Raises RunError where the trainer can't be paused."""
        self.pause.ask(reason, steps=self.steps.seen_now is not None)

    def resize(self, servers: int, reason: str) -> None:
        raise RunError("this run has no servers of the launcher's", "trainer.rung=servers has")

    # ── the loop ──

    async def run(self) -> RunOutcome:
        """Until the run has ended."""
        history = self._history
        was_begun = history.memory.was_begun
        if was_begun:
            history.adopt(f"a run that is {history.state}")
        else:
            history.begin("the command is starting")
        self._incidents.begin()
        try:
            if history.memory.ending is not None:
                return self._outcome(history.memory.ending, history.memory.ending_reason)
            return await self._supervise(was_begun)
        except RunError as error:
            return self._end(TerminalStatus.ERRORED, str(error))
        finally:
            if self._process is not None:
                await self._process.end()
            self._incidents.close(self._clock())
            await self._artifacts.close()
            with contextlib.suppress(TimeoutError):  # a disk that stalls must not keep the outcome from the driver
                async with asyncio.timeout(FLUSH_S):
                    await history.flush()

    async def _supervise(self, was_begun: bool) -> RunOutcome:
        """Raises RunError: the run must halt."""
        fault = await self._or_mended(self._left_by_a_predecessor() if was_begun else self._found_at_first())
        while not self._asked.is_set():
            ended = await self._or_mended(self._incarnation(fault))
            if isinstance(ended, RunOutcome):
                return ended
            fault = ended
        return self._end(TerminalStatus.ABORTED, self._history.memory.abort_reason)

    async def _found_at_first(self) -> ForeignFault | None:
        await self._mend.check_first()
        return self._learning.find(self._checkpoints.proven(self.steps.lines), self._clock())

    async def _or_mended(self, doing: Coroutine[Any, Any, Made]) -> Made | None:
        """None where it showed that the weights are not what changed, and that is to be tried again (P12)."""
        try:
            return await doing
        except OutsideWeights as error:
            await self._stop()
            await self._mend.wait(error)
            return None

    async def _incarnation(self, fault: ForeignFault | None) -> ForeignFault | RunOutcome:
        """From the choice of what it resumes from to its end. Raises RunError."""
        step = await self._repair(fault) if fault else await self._checkpoints.resume_from(self.steps.lines, None)
        if self._asked.is_set():  # also while it was asked who is at fault
            return self._end(TerminalStatus.ABORTED, self._history.memory.abort_reason)
        await self._checkpoints.prepare(step, self.steps.lines)
        await self._checkpoints.clear(after=step, is_condemned=fault is not None and fault.incident is not None)
        self._owe_proof(step)
        await self._mend.started()
        try:
            await self._start(step, is_again=fault is not None or self._process is not None)
        except ServerError as error:
            return ForeignFault(cause=Cause.TRAINER_CRASH, subject=TRAINER, reason=error.message)
        return await self._watch()

    async def _left_by_a_predecessor(self) -> ForeignFault | None:
        """Its supervisor was killed, and the command with it. Raises OutsideWeights where a mend is to be awaited."""
        mine = [one for one in self._history.command_events if one.get("attempt") == self._journal.attempt]
        starts = [one for one in mine if one["event"] == "trainer.starting"]
        if not starts and not self._history.incidents.open:
            return await self._found_at_first()
        self._mend.resumed()
        self._owe_proof(FIRST_WEIGHTS if self.steps.last_step is None else self.steps.last_step)
        if starts:  # what it had reported by then is read first
            self._source.begin(int(number_of(starts[-1].get("at_byte"), 0.0)))
            if (fault := await self._take_all(known=self.steps.last_step)) is not None:
                return fault
        fault = ForeignFault(cause=Cause.TRAINER_CRASH, subject=TRAINER, reason=SUPERVISOR_LOST)
        return self._learning.find(self.steps.lines, self._clock()) or fault

    def _owe_proof(self, step: int) -> None:
        if (onset_step := self._mend.onset_after(step)) is not None:
            self._learning.restored(step, onset_step)

    async def _repair(self, fault: ForeignFault) -> int:
        """Stop what is left, and wait as the budget asks for; the step to resume from. Raises RunError."""
        history, now = self._history, self._clock()
        if fault.cause is Cause.REWARD_COLLAPSE:
            await self._stop()
            await self._mend.accuse(fault.reason, fault.onset_step)
        if history.state is not RunState.INITIALIZING:
            history.enter(RunState.REPAIRING, fault.reason)
        if fault.subject not in {one.subject for one in history.incidents.open.values()}:
            self._incidents.opened(fault.trouble, DOING[fault.cause], now)
        if fault.cause is Cause.TRAINER_HANG:
            await within(EVIDENCE_S, self._asked)
        await self._stop()
        repair = fault.next_repair(history.attempts, self._config.restart, now, self._progress.at(TRAINER))
        if repair.rung is Rung.HALT:
            raise RunError(repair.reason, await asyncio.to_thread(last_words, self._paths.trainer_log))
        step = await self._checkpoints.resume_from(self.steps.lines, fault.incident)
        history.attempted(fault.attempt(repair.rung, now, step))
        await history.flush()
        await within(repair.not_before - self._clock(), self._asked)
        if fault.incident is not None:
            self._learning.restored(step, fault.onset_step)
        return step

    async def _start(self, step: int, *, is_again: bool) -> None:
        """Raises ServerError."""
        path, history = self._checkpoints.path_of(step), self._history
        facts: dict[str, object]
        if path is not None or is_again:
            reason = "from the beginning" if path is None else f"from {path.name}"
            self.steps.lineage += 1
            facts = {"lineage": self.steps.lineage}
            history.event("trainer.restored", subject=TRAINER, reason=reason, global_step=step, **facts)
        self._doubts.begin(step, self.steps.lines)
        self.steps.begin(step)
        self._checkpoints.started()
        self._source.begin(after=step)
        self.pause.begin()
        facts = {"with_overrides": {}, "at_byte": self._source.at_byte}
        history.event("trainer.starting", subject=TRAINER, reason=f"{self._adapter.reads} is read", **facts)
        await history.flush()
        began, self._process = self._clock(), None
        self._process = await start(
            self._adapter.command(path), self._paths, {**self._variables, **self._files()}, stop_s=self._adapter.stop_s
        )
        self.since = self._clock()
        if is_again:
            facts = {"pid": self._process.pid, "seconds": self.since - began}
            history.event("trainer.restarted", subject=TRAINER, reason="", **facts)

    def _files(self) -> dict[str, str]:
        """For a trainer that reports its steps itself: the file for them, and the one with what a person wants."""
        if self._config.trainer.metrics is None or self._adapter.source is None:
            return {}
        return {STEPS: str(self._adapter.source.absolute()), REQUESTS: str((self._paths.keys / FILE).absolute())}

    async def _stop(self) -> None:
        if self._process is not None and (left := await self._process.end()):
            raise RunError(f"processes of the command survive SIGKILL: {left}", "the machine may need a restart")

    # ── one incarnation ──

    async def _watch(self) -> ForeignFault | RunOutcome:
        """Until it has ended, or has to."""
        assert self._process is not None
        process, settings = self._process, self._config.health
        ending = asyncio.create_task(process.wait_ended())
        asked = asyncio.create_task(self._asked.wait())
        tree = TreeWatch(process, self._adapter.is_trainer)
        watch = ProgressWatch(settings, tree, self._checkpoints.seen, self._clock, self._waits)
        losing: dict[Process, asyncio.Task[None]] = {}
        try:
            while True:
                waited = {ending, asked, *(one for one in losing.values() if not one.done())}
                await asyncio.wait(waited, timeout=settings.look_interval_s, return_when=asyncio.FIRST_COMPLETED)
                if self._asked.is_set():
                    await self._stop()
                    await self._take_all()
                    await asyncio.to_thread(self.steps.write)
                    return self._end(TerminalStatus.ABORTED, self._history.memory.abort_reason)
                has_ended = ending.done()
                if (fault := await self._take_all()) is not None:
                    return fault
                if has_ended:
                    return await self._ended(process, ending.result())
                verdict = await asyncio.to_thread(watch.look, self.steps.committed, self.steps.median_step_s)
                # After the last step ranks end one by one, while the first may still save what it has recorded.
                if tree.lost and (tree.has_lost_all or not self._is_done(None)):
                    return await self._ended(process, None, tree.lost)
                losing |= {one: asyncio.create_task(tree.ended(one)) for one in tree.ranks if one not in losing}
                if verdict.health is Health.DEAD:
                    return ForeignFault(cause=Cause.TRAINER_HANG, subject=TRAINER, reason=verdict.reason)
                if watch.unseen:
                    self._doubts.tell(f"{watch.unseen}: check {self._adapter.reads}")
                self._doubts.tell(watch.torn)
                self._doubts.tell(self._checkpoints.look(self.steps.committed))
        finally:
            for task in (ending, asked, *losing.values()):
                task.cancel()

    def _waits(self) -> str:
        return self.pause.waits_for or self.waits_for()

    async def _ended(self, process: HostedProcess, ended: Ended | None, lost: str = "") -> ForeignFault | RunOutcome:
        """`ended` None: it has not, and is ended now, since `lost` says what of it has."""
        if ended is None:  # nothing of it has anything left to save
            kill(process)
        await self._stop()  # what it left behind
        exit_code, why = (None, lost) if ended is None else (ended.exit_code, ended.cause)
        if (fault := await self._take_all(is_over=exit_code == 0)) is not None:
            return fault
        last = self.steps.seen_now
        if (ended is None or not ended.cause) and self._is_done(exit_code):
            what = "no step was seen" if last is None else f"its last step was {last}"
            if last is None:
                self._doubts.tell(f"it ended, and {what}: check {self._adapter.reads}")
            await asyncio.to_thread(self.steps.write)
            self._close_incidents("training is done")
            how = "its trainer has ended" if ended is None else f"the command ended with exit code {exit_code}"
            return self._end(TerminalStatus.FINISHED, f"{how}; {what}")
        fault = await asyncio.to_thread(fault_of_end, self._paths.trainer_log, self._source.log_start, exit_code, why)
        facts: dict[str, object] = {"pid": process.pid, "exit_code": exit_code}
        self._history.event("trainer.died", subject=TRAINER, reason=fault.reason, **facts)
        return fault

    def _is_done(self, exit_code: int | None) -> bool:
        return self._adapter.is_done(exit_code, self.steps.seen_now, self.steps.total)

    async def _take_all(self, *, known: int | None = None, is_over: bool = False) -> ForeignFault | None:
        """Read what is new; the first damage that it shows. `known`: steps up to this one have been taken."""
        seen = await asyncio.to_thread(self._source.read, is_over=is_over)
        fault = await self._take([one for one in seen if known is None or one.step > known])
        if not self._learning.owes_proof:  # a line of a step undoes those that a contradicted restore gives back
            await asyncio.to_thread(self.steps.write)
        return fault

    async def _take(self, seen: Sequence[StepSeen]) -> ForeignFault | None:
        """Lines come in bundles, as buffers are emptied: their steps are spread over the time since the last one."""
        now, seen_at = self._clock(), self.steps.seen_at
        before = self.since if seen_at is None else seen_at
        for number, one in enumerate(seen, 1):
            if one.is_paused is not None:
                self.pause.take(one.is_paused)
                continue
            age_s = (now - before) * (1 - number / len(seen))
            if not self.steps.take(one, now - age_s, age_s=age_s):
                continue
            self._doubts.look(one)
            if (fault := self._learning.find(self.steps.lines, self._clock())) is not None:
                return fault
            if not self._learning.owes_proof:
                self._got_on(one.step)
        return None

    def _got_on(self, step: int) -> None:
        self._history.enter(RunState.RUNNING, "it steps")
        self._progress.note(step + 1, (), self._clock())
        self._close_incidents("training continues")

    # ── endings ──

    def _close_incidents(self, reason: str) -> None:
        open_ = [one for one in self._history.incidents.open.values() if one.subject in OF_LEARNING]
        self._incidents.ended([Ending(incident=one, reason=reason) for one in open_], self._clock())

    def _end(self, status: TerminalStatus, reason: str) -> RunOutcome:
        memory = self._history.memory
        if memory.ending is not None:  # the Coordinator of the servers was first
            return self._outcome(memory.ending, memory.ending_reason)
        self._history.begun(Halt(reason=reason, word=status))
        self._history.enter(RunState.SHUTTING_DOWN, reason)
        return self._outcome(status, reason)

    def _outcome(self, status: TerminalStatus, reason: str) -> RunOutcome:
        return RunOutcome(status=status, reason=reason, last_step=self.steps.last_step)
