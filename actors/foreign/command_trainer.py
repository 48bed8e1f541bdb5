"""Another project's trainer, as the Coordinator sees and orders its trainer: a command that runs, or does not.

    restore ─► the checkpoint is where the command looks for it, the others are set aside
    resume  ─► it runs; its steps are read and judged ─► ended, hung, done, or its steps show damage
    pause   ─► it waits between two steps, if a person asked and it can; else it is stopped

What it says of itself, what its folders and its process tree show, is in `facts` and `incident`; what follows from them
is the plan's (launcher/policy/recovery.py). Rung A has no gate: a step is judged after it was trained on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from actors.foreign.fleet import DoorHandle
from actors.foreign.foreign_checkpoints import ForeignCheckpoints
from actors.foreign.foreign_learning import LearningWatch
from actors.foreign.foreign_process import TreeWatch, kill, start
from actors.foreign.foreign_progress import ProgressWatch
from actors.foreign.foreign_steps import ForeignSteps
from actors.foreign.reward_check import KEY, Objection, objection
from actors.foreign.step_doubts import StepDoubts
from actors.foreign.step_source import StepSource
from actors.processes.background_tasks import BackgroundTasks
from actors.processes.hosted_process import Ended, HostedProcess
from actors.processes.process_tree import Process
from actors.serving.server_log_tail import decisive_lines, tail
from actors.supervision.run_history import ProgressTracker, RunHistory, furthest_step
from launcher.adapters.foreign_health import report_every, unproven_of, was_started
from launcher.adapters.trainer_adapter import StepSeen, adapter_of
from launcher.base.errors import RunError, ServerError, TrainerError
from launcher.base.messages import Cause, Health, Incident, Verdict
from launcher.config.schema import RunConfig
from launcher.policy.exit_cause import find_trainer_cause
from launcher.policy.incident_policy import OF_THE_MONITOR, REWARD, SUBJECT_OF
from launcher.policy.observed import TRAINER, TrainerFacts
from launcher.policy.restore import FIRST_WEIGHTS
from launcher.run_files.control_requests import FILE
from launcher.run_files.journal import number_of
from launcher.run_files.run_paths import RunPaths

SUPERVISOR_LOST = "the actor that ran it ended, and the command with it"
STEPS, REQUESTS = "GRPO_TRAINER_STEPS", "GRPO_TRAINER_REQUESTS"
CHECK_EVERY_S = 10.0
"""Between two checks of a reward function that is broken: each may import what takes seconds."""
SOON_S = 0.1
OF_ITS_END = frozenset({Cause.TRAINER_CRASH, Cause.TRAINER_OOM, Cause.TRAINER_HANG})
"""What its last words may say of its end; whatever else they say, it has crashed."""
STOPPED = Verdict(health=Health.HEALTHY, reason="it is stopped, as ordered")
STARTING = Verdict(health=Health.UNKNOWN, reason="it has not taken a step yet")
CHECKING = Verdict(health=Health.UNKNOWN, reason="it is found out what was left of it, or who is at fault")


class CommandTrainer:
    """`incident`: what is wrong with what it learns. `changed` is set when the plan should look again."""

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        attempt: int,
        history: RunHistory,
        variables: Mapping[str, str],
        *,
        changed: asyncio.Event,
        door: DoorHandle | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`variables`: the environment that it, and its check, are given beside their own. `door`: where it asks the
        launcher's servers. Raises ConfigError, JournalError."""
        self._config = config
        self._paths = paths
        self._attempt = attempt
        self._history = history
        self._variables = variables
        self._changed = changed
        self._door = door
        self._clock = clock
        self._adapter = adapter_of(config.trainer)
        self.stop_s = self._adapter.stop_s
        self.steps = ForeignSteps(paths, attempt, history.command_events)
        self.progress = ProgressTracker(history, furthest_step(paths.metrics, attempt))
        self.checkpoints = ForeignCheckpoints(
            config,
            self._adapter,
            history,
            are_ours=was_started(history.command_events),
            unproven=unproven_of(history.command_events),
            paths=paths,
        )
        self.incident: Incident | None = None
        self.since = clock()
        self._source = StepSource(self._adapter, paths.trainer_log)
        self._learning = LearningWatch(config.reward_health, history)
        self._doubts = StepDoubts(history, self._adapter.reads)
        self._tasks = BackgroundTasks()
        self._process: HostedProcess | None = None
        self._watching: asyncio.Task[None] | None = None
        self._over = asyncio.Event()  # ends a check that is under way
        self._one_check = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._stopping = asyncio.Event()  # ends the watch between two readings: one that is cut off loses its steps
        self._dead: Verdict | None = None
        self._told = self._done = ""  # its own last words; how it is done
        self._verdict = STARTING
        self._restored_step: int | None = None  # None: no checkpoint was chosen for the next start
        self._has_begun = False  # this attempt has started it
        self._is_checking = False
        self._counts = False  # it has taken a step that is not in doubt
        self._can_wait = self.is_paused = False  # it waits for the end of a pause, as it has reported

    # ── seeing ──

    @property
    def pid(self) -> int:
        """Of the command, 0 where none runs."""
        return 0 if self._process is None or self._process.ended is not None else self._process.pid

    @property
    def _is_running(self) -> bool:
        return self._watching is not None and not self._watching.done()

    @property
    def waits_for(self) -> str:
        """What it waits for that is not its own work; "" where nothing is. Once a pause is over it owes the line that
        says that it goes on: one that hung meanwhile would wait for ever."""
        if self.is_paused:
            return self._history.memory.hold_reason
        return "" if self._door is None else self._door.waits_for()

    @property
    def next_step(self) -> int:
        steps = (self.steps.last_step, self._restored_step)
        return 1 + max((step for step in steps if step is not None), default=FIRST_WEIGHTS)

    @property
    def report_every(self) -> int:
        return report_every(self.steps.lines)

    def facts(self) -> TrainerFacts:
        """It counts as loaded between a restore and its start, and once it has stepped from there. Raises RunError
        where it may not be started, and what is a defect of the watch."""
        self._tasks.check()
        has_shown = self._counts or self.is_paused or self.incident is not None
        is_loaded = self._restored_step is not None and not self._is_checking
        if self._dead is not None:
            verdict = self._dead
        elif self._is_checking:
            verdict = CHECKING
        elif not self._is_running:
            verdict = STOPPED
        else:
            verdict = self._verdict if has_shown else STARTING
        return TrainerFacts(
            verdict=verdict,
            is_loaded=is_loaded and (has_shown or not self._is_running) and self._dead is None,
            is_paused=not self._is_running or self.is_paused,
            policy_version=0,
            lineage=0,
            next_step=self.next_step,
            is_finished=bool(self._done),
            told=self._done or self._told,
            is_command=True,
            waits_itself=self._is_running and self.is_paused,
        )

    def refuse_hold(self) -> None:
        """Raises RunError where it steps, and can't wait for the end of a pause."""
        if self._is_running and self.steps.seen_now is not None and not self._can_wait:
            raise RunError(
                "this trainer can't be paused: it has not reported that it waits for the end of a pause",
                "give it the LauncherCallback (launcher/adapters/trainer_callback.py), or stop the run, which resumes "
                "from its checkpoint",
            )

    # ── acting ──

    def begin(self) -> None:
        """Find out what was left, and whether anything may be started: where not, `facts` raises RunError."""
        self._is_checking = True
        self._tasks.start(self._begin())
        self._tasks.start(self._ask_again())

    async def _begin(self) -> None:
        """Raises RunError."""
        mine = [one for one in self._history.command_events if one.get("attempt") == self._attempt]
        starts = [one for one in mine if one["event"] == "trainer.starting"]
        if starts:
            await self._take_over(int(number_of(starts[-1].get("at_byte"), 0.0)))
        elif (found := await self._object()) is not None:
            raise RunError(f"{found.why}; the trainer was not started", "mend the reward function, or the check")
        else:
            self.incident = self._learning.find(self.checkpoints.proven(self.steps.lines), self._clock())
        self._is_checking = False
        self._changed.set()

    async def _take_over(self, at_byte: int) -> None:
        """The Coordinator before this one was killed, and the command with it: what it had reported is read first."""
        self._has_begun = True
        unproven = self.checkpoints.unproven
        if unproven is not None and unproven.is_contradicted:  # it was stopped
            if unproven.since is not None:
                self._restored_step = unproven.restored_step
                self.incident = self._outside(unproven.why, self._clock())
            elif (broken := await self._object()) is not None:
                self.incident = self._broken(broken.why, unproven.onset_step)
            return
        self._dead = Verdict(health=Health.DEAD, reason=SUPERVISOR_LOST, cause=Cause.TRAINER_CRASH)
        self._owe_proof(FIRST_WEIGHTS if self.steps.last_step is None else self.steps.last_step, None)
        self._source.begin(at_byte)
        found = await self._take_all(known=self.steps.last_step)
        self.incident = found or self._learning.find(self.steps.lines, self._clock())

    async def restart(self) -> None:
        """What is left of it ends; the next one waits to be told from where. Raises RunError."""
        await self.stop()
        # One that was ended as hung may have reported more by then, and have checkpoints of those steps.
        if self.incident is None and (found := await self._take_all()) is not None:
            await self._accuse(found)
        self._restored_step = None

    async def restore(self, step: int, onset_step: int | None) -> None:
        """The checkpoint of a step becomes what it resumes from. Raises RunError."""
        await self.stop()
        lines, found = self.steps.lines, self.checkpoints
        found.check(step, lines)
        await found.prepare(step, lines)
        is_broken = self.incident is not None and self.incident.cause is Cause.VERIFIER_BROKEN
        await found.clear(after=step, is_condemned=onset_step is not None and not is_broken)
        self._owe_proof(step, onset_step)
        path = found.path_of(step)
        if path is not None or self._has_begun:
            reason = "from the beginning" if path is None else f"from {path.name}"
            self.steps.lineage += 1
            self._history.event(
                "trainer.restored", subject=TRAINER, reason=reason, global_step=step, lineage=self.steps.lineage
            )
        self._doubts.begin(step, lines)
        self.steps.begin(step)
        self._restored_step = step
        if not is_broken:
            self.incident = None

    async def resume(self) -> Mapping[str, object]:
        """Start it, where it does not run. Raises RunError."""
        if self._is_running or self._restored_step is None:
            return {}
        path, history = self.checkpoints.path_of(self._restored_step), self._history
        if self._door is not None:
            await self._door.new_client(path is None)
        self.checkpoints.started()
        self._source.begin(after=self._restored_step)
        self._has_begun = True
        self._counts = self._can_wait = self.is_paused = False
        self._told = ""
        at_byte, reason = self._source.at_byte, f"{self._adapter.reads} is read"
        history.event("trainer.starting", subject=TRAINER, reason=reason, with_overrides={}, at_byte=at_byte)
        await history.flush()
        async with self._starting:
            return await self._start(path)

    async def _start(self, path: Path | None) -> Mapping[str, object]:
        """Not once the run ends: the door, and the disk, may have kept the order waiting until then."""
        if self._over.is_set():
            raise TrainerError("the run ended before the trainer was started")
        variables = {**self._variables, **self._files()}
        try:
            self._process = await start(self._adapter.command(path), self._paths, variables, stop_s=self.stop_s)
        except ServerError as error:
            self._dead = Verdict(health=Health.DEAD, reason=error.message, cause=Cause.TRAINER_CRASH)
            raise
        self.since = self._clock()
        self._verdict = STARTING
        self._watching = self._tasks.start(self._watch(self._process))
        return {"pid": self._process.pid}

    async def hold(self) -> None:
        """Returns when it waits between two steps: it reads itself what a person asks for. Raises TrainerError."""
        while not self.is_paused:
            if not self._is_running:
                raise TrainerError("the trainer ended before it paused")
            if not self._history.memory.hold_reason:  # it reads that too, and may never wait
                raise TrainerError("the pause was taken back before the trainer waited")
            self.refuse_hold()
            await asyncio.sleep(SOON_S)

    async def stop(self) -> None:
        """Raises RunError."""
        if self._watching is not None:
            self._stopping.set()
            await asyncio.wait([self._watching])
            self._watching = None
        self._stopping.clear()
        self._dead = None
        self.is_paused = False
        await self._end_process()

    async def halt(self, *, reinstates: bool) -> None:
        """At the end of the run: stop it, and read what it has said until then. Raises RunError."""
        self._over.set()
        async with self._starting:  # one that is being started is stopped once it is known
            was_running = self._is_running
            await self.stop()
        if was_running and self.incident is None:
            await self._take_all()
            await asyncio.to_thread(self.steps.write)
        if reinstates:
            await asyncio.to_thread(self.steps.withdraw, self._history.command_events)
            await self.checkpoints.put_back()

    async def close(self) -> None:
        self._over.set()
        async with self._one_check:  # one that is cut off leaves what it has started
            await self._tasks.close()
        if self._process is not None:
            await self._process.end()

    async def _end_process(self) -> None:
        if self._process is not None and (left := await self._process.end()):
            raise RunError(f"processes of the command survive SIGKILL: {left}", "the machine may need a restart")

    def _files(self) -> dict[str, str]:
        """For a trainer that reports its steps itself: the file for them, and the one with what a person wants."""
        if self._config.trainer.metrics is None or self._adapter.source is None:
            return {}
        return {STEPS: str(self._adapter.source.absolute()), REQUESTS: str((self._paths.keys / FILE).absolute())}

    def _owe_proof(self, step: int, onset_step: int | None) -> None:
        """Since when rewards are low, by the plan, the open incidents, or what the attempt before has left: where that
        is later than `step`, the first steps after it show whether the weights were the cause."""
        incidents, unproven = self._history.incidents, self.checkpoints.unproven
        lines = [
            line
            for one in incidents.open.values()
            if one.subject in OF_THE_MONITOR
            for line in incidents.lines[one.number]
        ]
        onsets = [onset_step, *(line.get("onset_step") for line in lines)]
        if unproven is not None:
            onsets.append(unproven.onset_step)
        known = next((onset for onset in onsets if isinstance(onset, int)), None)
        if known is not None and step < known:
            self._learning.restored(step, known)

    # ── one incarnation ──

    async def _watch(self, process: HostedProcess) -> None:
        """Until it has ended, or has to."""
        settings = self._config.health
        ending, stopping = asyncio.create_task(process.wait_ended()), asyncio.create_task(self._stopping.wait())
        tree = TreeWatch(process, self._adapter.is_trainer)
        watch = ProgressWatch(settings, tree, self.checkpoints.seen, self._clock, lambda: self.waits_for)
        losing: dict[Process, asyncio.Task[None]] = {}
        try:
            while True:
                waited = {ending, stopping, *(one for one in losing.values() if not one.done())}
                await asyncio.wait(waited, timeout=settings.look_interval_s, return_when=asyncio.FIRST_COMPLETED)
                if self._stopping.is_set():
                    return
                has_ended = ending.done()
                if (found := await self._take_all()) is not None:
                    await self._accuse(found)
                    return
                if has_ended:
                    await self._ended(process, ending.result())
                    return
                verdict = await asyncio.to_thread(watch.judge_progress, self.steps.committed, self.steps.median_step_s)
                # After the last step ranks end one by one, while the first may still save what it has recorded.
                if tree.lost and (tree.has_lost_all or not self._is_done(None)):
                    await self._ended(process, None, tree.lost)
                    return
                losing |= {one: asyncio.create_task(tree.ended(one)) for one in tree.ranks if one not in losing}
                self._verdict = verdict
                if verdict.health is Health.DEAD:
                    self._dead = verdict
                    return
                if watch.unseen:
                    self._doubts.tell(f"{watch.unseen}: check {self._adapter.reads}")
                self._doubts.tell(watch.torn)
                self._doubts.tell(self.checkpoints.look_for_proof(self.steps.committed))
        finally:
            for task in (ending, stopping, *losing.values()):
                task.cancel()
            self._changed.set()

    async def _ended(self, process: HostedProcess, ended: Ended | None, lost: str = "") -> None:
        """`ended` None: it has not, and is ended now, since `lost` says what of it has."""
        if ended is None:  # nothing of it has anything left to save
            kill(process)
        await self._end_process()  # what it left behind
        exit_code, why = (None, lost) if ended is None else (ended.exit_code, ended.cause)
        if (found := await self._take_all(is_over=exit_code == 0)) is not None:
            await self._accuse(found)
            return
        last = self.steps.seen_now
        if (ended is None or not ended.cause) and self._is_done(exit_code):
            what = "no step was seen" if last is None else f"its last step was {last}"
            if last is None:
                self._doubts.tell(f"it ended, and {what}: check {self._adapter.reads}")
            await asyncio.to_thread(self.steps.write)
            how = "its trainer has ended" if ended is None else f"the command ended with exit code {exit_code}"
            self._done = f"{how}; {what}"
            return
        lines = await asyncio.to_thread(lambda: decisive_lines(tail(self._paths.trainer_log, self._source.log_start)))
        found_cause = find_trainer_cause(lines, exit_code)
        cause = found_cause.cause if found_cause.cause in OF_ITS_END else Cause.TRAINER_CRASH
        self._told = lines[-1] if lines and not why and exit_code is not None and exit_code > 0 else ""
        reason = "; ".join(filter(None, [found_cause.reason, why, self._told and f"its last words: {self._told}"]))
        facts: dict[str, object] = {"pid": process.pid, "exit_code": exit_code}
        self._history.event("trainer.died", subject=TRAINER, reason=reason, **facts)
        self._dead = Verdict(health=Health.DEAD, reason=reason, cause=cause)

    def _is_done(self, exit_code: int | None) -> bool:
        return self._adapter.is_done(exit_code, self.steps.seen_now, self.steps.total)

    async def _take_all(self, *, known: int | None = None, is_over: bool = False) -> Incident | None:
        """Read what is new; the first damage that it shows. `known`: steps up to this one have been taken."""
        seen = await asyncio.to_thread(self._source.read, is_over=is_over)
        if seen and self._door is not None:
            self.steps.beside = await self._door.figures()
        found = self._take_steps([one for one in seen if known is None or one.step > known])
        if not self._learning.owes_proof:  # a line of a step undoes those that a contradicted restore gives back
            await asyncio.to_thread(self.steps.write)
        return found

    def _take_steps(self, seen: Sequence[StepSeen]) -> Incident | None:
        """Lines come in bundles, as buffers are emptied: their steps are spread over the time since the last one."""
        now, seen_at = self._clock(), self.steps.seen_at
        before = self.since if seen_at is None else seen_at
        for number, one in enumerate(seen, 1):
            if one.is_paused is not None:
                self._can_wait = True
                self.is_paused = one.is_paused
                self._changed.set()
                continue
            age_s = (now - before) * (1 - number / len(seen))
            if not self.steps.take_step(one, now - age_s, age_s=age_s):
                continue
            self._doubts.note_step(one)
            if (found := self._learning.find(self.steps.lines, self._clock())) is not None:
                return found
            if not self._learning.owes_proof:
                self.progress.note(one.step + 1, (), self._clock())
                if not self._counts:
                    self._counts = True
                    # An event of its own: the run's state may stay another for the repair of a server.
                    reason = "a step of it leaves no doubt of what it began from"
                    self._history.event("trainer.stepped", subject=TRAINER, reason=reason, global_step=one.step)
                    self._changed.set()
        return None

    # ── who is at fault ──

    async def _accuse(self, found: Incident) -> None:
        """Stop it, and where its rewards are low ask its known answers: a reward function that fails them is at fault,
        and not the weights."""
        self._is_checking = True
        try:
            await self._end_process()
            if found.cause is Cause.OUTSIDE_WEIGHTS:
                await self._history.flush()
                self.checkpoints.unproven = unproven_of(self._history.command_events)
            is_low = found.cause in (Cause.REWARD_COLLAPSE, Cause.OUTSIDE_WEIGHTS)
            onset_step = self._learning.onset_step if found.onset_step is None else found.onset_step
            objected = await self._object() if is_low and onset_step is not None else None
            if objected is not None and objected.is_known and onset_step is not None:
                if found.cause is Cause.OUTSIDE_WEIGHTS:  # the newest checkpoint from before the onset is as good
                    await asyncio.to_thread(self.steps.withdraw, self._history.command_events)
                    await self.checkpoints.put_back()
                broken = self._broken(f"{objected.why}; {found.reason}", onset_step)
                found = replace(broken, had_learned=found.had_learned)
            elif objected is not None:
                self._doubts.tell(
                    f"{objected.why}; it is not known whether the reward function is at fault: check {KEY}"
                )
            if found.cause is not Cause.OUTSIDE_WEIGHTS:
                # What it began from is no longer all that lies there: were the reward function mended before a restore,
                # it would be started beside later checkpoints, which were trained on the false rewards.
                self._restored_step = None
            self.incident = found
        finally:
            self._is_checking = False

    def _broken(self, reason: str, onset_step: int) -> Incident:
        facts: dict[str, object] = {"onset_step": onset_step, "global_step": onset_step - 1}
        self._history.event("health.verifier_broken", subject=REWARD, reason=reason, **facts)
        self.checkpoints.unproven = unproven_of(self._history.command_events)
        open_ = [one for one in self._history.incidents.open.values() if one.subject == REWARD]
        since = open_[0].since if open_ else self._clock()
        return Incident(cause=Cause.VERIFIER_BROKEN, subject=REWARD, reason=reason, since=since, onset_step=onset_step)

    def _outside(self, reason: str, since: float) -> Incident:
        cause = Cause.OUTSIDE_WEIGHTS
        return Incident(cause=cause, subject=SUBJECT_OF[cause], reason=reason, since=since)

    async def _ask_again(self) -> None:
        """For as long as the run lasts: a reward function that was broken, and is sound again, holds nobody up."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            broken = self.incident
            if broken is None or broken.cause is not Cause.VERIFIER_BROKEN or self._is_running:
                continue
            if await self._object() is None and not self._over.is_set() and self.incident is broken:
                self._history.event("health.mended", subject=REWARD, reason=f"no longer: {broken.reason}")
                self.incident = None
                self._changed.set()

    async def _object(self) -> Objection | None:
        async with self._one_check:
            return await objection(self._config, self._paths, self._adapter, self._over, self._variables)
