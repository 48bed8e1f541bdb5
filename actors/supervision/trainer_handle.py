"""The Coordinator's handle of the trainer: its actor, its last view, and the end of its process or of its loop.

The end of a process is learnt from its pidfd, in milliseconds. Ray then starts an empty one under the same name, unless
a parked one takes its place (actors/supervision/standby_handle.py). What shows that the trainer works, fails or has
ended (`TrainerWatch`, `TrainerFault`, `TrainerExit`) is judged by launcher/policy/trainer_liveness.py and
launcher/policy/exit_cause.py. A look waits for nobody: neither a stopped trainer nor one that holds the interpreter
delays it.
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
from typing import Any, assert_never

import ray

from actors.cluster.actor_calls import ActorAway, ActorProbe, answer, call_method
from actors.cluster.fencing import MARGIN_S
from actors.cluster.node_identity import is_here
from actors.cluster.ray_oom_kills import killed_for_memory
from actors.processes.exit_watch import process_ended
from actors.processes.process_tree import errors_file, process_state
from actors.serving.server_log_tail import decisive_lines, size_of, tail, words_of_abort
from actors.supervision.standby_handle import StandbyHandle
from launcher.base.errors import LauncherError, TrainerError
from launcher.base.messages import (
    Cause,
    Health,
    Incident,
    LoopFailure,
    Overrides,
    ServerState,
    TrainerReady,
    TrainerView,
    Verdict,
)
from launcher.base.rank_location import RankLocation
from launcher.config.supervision import HealthConfig
from launcher.policy.exit_cause import ExitFinding, find_trainer_cause
from launcher.policy.memory_backoff import Lengths
from launcher.policy.observed import TrainerFacts
from launcher.policy.trainer_liveness import (
    STEPS_KEPT,
    TrainerEvidence,
    TrainerLook,
    judge_trainer,
    observe_trainer,
)
from launcher.resources.hardware import OomKillWatch

ANSWER_S = 3.0
LOOK_S = 1.0
"""Between two questions to the trainer; its end, and that of its loop, are learnt at once."""
SOON_S = 0.05
RESTART_S = 60.0
NOTHING = TrainerView(pid=0)
NO_ROOM = ExitFinding(cause=Cause.NODE_LOST, reason="Ray has found no node for the trainer so far")
ENDED = ExitFinding(cause=Cause.TRAINER_CRASH, reason="its process ended")
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
        self._step = -1
        self._step_at = 0.0
        self._is_publishing = self._has_published = False

    def observe_view(self, view: TrainerView, *, heard_at: float, is_asked: bool) -> None:
        """`heard_at`: when it gave `view`. `is_asked`: another answer has been asked for and has not come."""
        now = self._clock()
        if (view.node, view.pid) != self._incarnation:
            self._incarnation = (view.node, view.pid)
            self._evidence = None
            self._step_s.clear()
            self._step = -1
            self._is_publishing = self._has_published = False
        was_publishing = self._is_publishing
        self._is_publishing = view.phase == "publish"
        self._has_published |= was_publishing and not self._is_publishing
        self._time_steps(view, now)
        before = self._evidence
        # That it waits is old news then: one that hung while it waited would be excused for ever.
        is_silent = is_asked and before is not None and heard_at == before.look.pinged_at
        state, cpu_s = process_state(view.pid) if is_here(view.node) else (None, 0.0)
        look = TrainerLook(
            at=now,
            state=state,
            cpu_s=cpu_s,
            pinged_at=heard_at,
            ping_waits=is_asked,
            progress=view.progress,
            waits_for="" if is_silent else waits_for(view),
            median_step_s=median(self._step_s) if self._step_s else None,
            # One that waited for an order may have begun a restore since. The first publication of a process reads
            # again what several ranks have written (PolicyModel.export).
            is_at_one_thing=view.phase == "checkpoint"
            or not (view.is_running or view.is_allowed)
            or (self._is_publishing and (bool(view.loading) or not self._has_published)),
        )
        self._evidence = TrainerEvidence(look=look) if before is None else observe_trainer(before, look, self._settings)

    def verdict(self) -> Verdict:
        return judge_trainer(self._evidence, self._settings, self._clock())

    def _time_steps(self, view: TrainerView, now: float) -> None:
        """Steps seen while it was working throughout; a pause between two of them is none of its time."""
        if waits_for(view) or view.next_step < self._step:
            self._step = -1
        elif self._step < 0:
            self._step = view.next_step
            self._step_at = now
        elif view.next_step > self._step:
            self._step_s.append((now - self._step_at) / (view.next_step - self._step))
            self._step = view.next_step
            self._step_at = now


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
            self._failed_before = (cause, failure.global_step)
            self._first_failed_at = self._failed_since
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
    """Why a process of this machine, alive yet, will have ended, found where it can't report that itself: from the
    kernel, from Ray, and from its log. An allocation that fails in a step may fail in one of Ray's threads next, before
    anybody has heard of the step. `log`: the trainer's."""

    def __init__(self, process: ProcessId, log: Path) -> None:
        self._process = process
        self._log = log
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


class TrainerHandle:
    """`ended` is called with the reason why a process ended. `actor` changes when `standby` takes over."""

    of = "the trainer"
    """As errors of its calls name it."""

    def __init__(
        self,
        actor: Any,
        *,
        ended: Callable[[str], None],
        changed: asyncio.Event,
        health: HealthConfig,
        log: Path,
        lease_s: float | None = None,
        standby: StandbyHandle | None = None,
    ) -> None:
        """`log`: what it wrote; a process that found no memory may report it there and nowhere else. `lease_s`: for how
        long a process that was cut off may still step; None where none can be."""
        self.view = NOTHING
        self.lengths = Lengths()
        self.order: OrderState = NoOrder()
        self.actor = actor
        self._standby = standby
        self._end = ProcessEnd()
        self._ended = ended
        self._changed = changed
        self._log = log
        self._log_read = 0
        self._load_s = health.trainer_first_s
        self._look_s = health.look_interval_s
        self._liveness = TrainerWatch(health)
        self._lease_s = lease_s
        self._fenced_until = 0.0
        self._watched = ProcessId("", 0)
        self._busy = ""
        self._busy_since = 0.0
        self._fault = TrainerFault()
        self._kills = OomKillWatch()
        self._run: asyncio.Task[None] | None = None
        self._before: tuple[tuple[RankLocation, ...], str] = ((), "")
        self.probe = ActorProbe(self._ask_view, heard=self._take_view)

    # ── seeing ──

    def begin_looking(self) -> None:
        self.probe.begin(lambda: LOOK_S)
        self.probe.tasks.start(self._judge_always())

    def expect(self) -> None:
        """It is about to be started."""
        self.order = StartOrdered()

    def adopt(self) -> None:
        """Wait for the end of a loop that an earlier Coordinator set going: a second `run` waits for the first."""
        if self.view.is_allowed:
            self._await_run()

    async def _ask_view(self) -> tuple[Any, TrainerView, int]:
        """With the size of its log before it was asked: up to there all is well, if the answer shows that."""
        log_bytes, actor = await self._log_size(), self.actor
        return actor, await answer(actor.view.remote(), within_s=ANSWER_S, of=self.of), log_bytes

    async def _log_size(self) -> int:
        """Read on a thread, since a disk may stall; then it is the size that was known."""
        try:
            async with asyncio.timeout(READ_S):  # `wait_for` may swallow a cancellation (Python 3.11)
                return await asyncio.to_thread(size_of, self._log)
        except TimeoutError:
            return self._log_read

    def _take_view(self, answered: tuple[Any, TrainerView, int]) -> None:
        actor, view, log_bytes = answered
        if actor is not self.actor:
            return  # it was asked before another took over
        if self.view.pid and view.node != self.view.node:
            self.fence()
        self.view = view
        if view.is_started or view.busy:  # those of one that is parked are nobody's predecessors
            self._before = view.ranks or self._before[0], view.gpus or self._before[1]
        self.lengths = self.lengths.updated(view.longest_sequence, view.largest_micro_batch)
        if view.is_started:
            self._kills.note_count(view.pid if is_here(view.node) else None)
        if view.failure is None:
            self._log_read = log_bytes
        self._watch(self._process)
        if view.busy != self._busy:
            self._busy = view.busy
            self._busy_since = self.probe.answered_at
        if view.is_allowed:  # perhaps by a question whose answer was lost: somebody must call `run`
            self._await_run()
        self._changed.set()

    def lost_with_node(self, node: str, reason: str) -> bool:
        """A node is lost; whether the trainer was on it. Behind a partition it may step until its lease is over."""
        if not node or self.view.node != node:
            return False
        self._end = ProcessEnd(self._process, ExitFinding(cause=Cause.NODE_LOST, reason=reason))
        self.fence()
        self._ended(reason)
        self._changed.set()
        return True

    def fence(self) -> None:
        """What of the trainer was on a lost node may run on there, until its lease is over: begin nothing before."""
        if self._lease_s is not None:
            self._fenced_until = time.monotonic() + self._lease_s + MARGIN_S

    def facts(self, unschedulable_since: float | None = None) -> TrainerFacts:
        self.probe.tasks.check()
        view, verdict, is_starting = self.view, self._verdict(), isinstance(self.order, StartOrdered)
        found, told = self._end.finding, self._end.told
        if unschedulable_since is not None and not is_starting:
            lost = found if found is not None and found.cause is Cause.NODE_LOST else NO_ROOM
            verdict = Verdict(health=Health.DEAD, reason=lost.reason, cause=lost.cause)
        is_there = view.is_started and not self._has_ended
        if is_there:
            told = "" if view.failure is None else f"{view.failure.kind}: {view.failure.message}"
            found = None if view.failure is None else finding_of(view.failure)
        answers = is_there and not is_starting and verdict.health is not Health.DEAD
        return TrainerFacts(
            verdict=verdict,
            is_loaded=view.is_loaded and answers,
            is_paused=not (view.is_allowed or view.is_running),
            policy_version=view.policy_version,
            lineage=view.lineage,
            next_step=view.next_step,
            is_publishing=view.phase == "publish",
            is_evaluating=view.phase == "evaluate",
            is_finished=view.is_finished and answers,
            ran_out=None if found is None else found.ran_out,
            unschedulable_since=unschedulable_since,
            told=told,
        )

    def incident(self, now: float) -> Incident | None:
        """Found by the loop itself, and no fault of its process (`TrainerFault`)."""
        return self._fault.incident(self.view.failure, now)

    def reward_answers(self) -> None:
        """Known answers were scored as they should be: the step that failed for want of a reward may be tried again."""
        self._fault.reward_answers(self.view.failure)

    @property
    def _process(self) -> ProcessId:
        return ProcessId(self.view.node, self.view.pid)

    @property
    def _has_ended(self) -> bool:
        """The process that gave the view is known to have ended since."""
        return self._process == self._end.process

    def _verdict(self) -> Verdict:
        view, is_busy = self.view, bool(self.view.busy) or self.view.pid == 0
        match self.order:
            case StartOrdered():
                return Verdict(health=Health.UNKNOWN, reason=view.busy or "starting")
            case OrderOverdue(reason) if is_busy and not self._has_ended:
                return Verdict(health=Health.DEAD, reason=reason, cause=Cause.TRAINER_HANG)
            case NoOrder() | OrderOverdue():
                return self._verdict_when_busy() if is_busy else self._verdict_by_view()
            case _ as unreachable:
                assert_never(unreachable)

    def _verdict_when_busy(self) -> Verdict:
        """With an order; who gave it may be gone, and its deadline counts all the same."""
        busy_s = time.monotonic() - self._busy_since
        if self._busy and busy_s > self._load_s and not self._has_ended:
            reason = f"{self._busy} for {busy_s:.0f} s, more than {self._load_s:g} s (health.trainer_first_s)"
            return Verdict(health=Health.DEAD, reason=reason, cause=Cause.TRAINER_HANG)
        return Verdict(health=Health.UNKNOWN, reason=self.view.busy or "starting")

    def _verdict_by_view(self) -> Verdict:
        view, found = self.view, self._end.finding or ENDED
        if self._has_ended or not view.is_started:
            reason = self._end.told if found is ENDED and self._end.told else found.reason
            return Verdict(health=Health.DEAD, reason=reason, cause=found.cause)
        cause = cause_of(view.failure)
        if view.failure is not None and cause not in NOT_OF_THE_PROCESS:
            return Verdict(health=Health.DEAD, reason=view.failure.message, cause=cause)
        return self._liveness.verdict()

    async def _judge_always(self) -> None:
        """Beside the questions, so that one that is not answered is seen to be none."""
        before = Health.UNKNOWN
        while True:
            self._liveness.observe_view(self.view, heard_at=self.probe.answered_at, is_asked=self.probe.is_waiting)
            if (health := self._liveness.verdict().health) is not before:
                before = health
                self._changed.set()
            await asyncio.sleep(self._look_s)

    def _watch(self, process: ProcessId) -> None:
        """One on another node is known by Ray alone: its calls fail, and another process answers."""
        if process != self._watched:
            self._watched = process
            if is_here(process.node):
                self.probe.tasks.start(self._wait_end(process))

    async def _wait_end(self, process: ProcessId) -> None:
        exit_of = TrainerExit(process, self._log)
        if await process_ended(process.pid):
            if not isinstance(self.order, StartOrdered):
                self._ended(f"process {process.pid} ended")
            self._note_end(await exit_of.find(self._kills.risen(), since=self._log_read), process)
            self._changed.set()

    # ── acting; each raises LauncherError ──

    async def start(self, overrides: Overrides) -> TrainerReady:
        """Have an empty process load everything; one that isn't is ended, and a parked or another empty one starts."""
        self.order = StartOrdered()
        before = self._before
        try:
            await asyncio.sleep(max(0.0, self._fenced_until - time.monotonic()))
            await self._until_empty(or_ended=True)
            await self._take_over()
            await self._until_empty()
            self._end = ProcessEnd(self._end.process)
            ready: TrainerReady = await self._within_load_s("start", dict(overrides), *before)
            return ready
        except LauncherError as error:
            told = "" if isinstance(error, ActorAway) else error.message
            self._note_end(find_trainer_cause([error.message], None), told=told)
            raise
        finally:
            if isinstance(self.order, StartOrdered):
                self.order = NoOrder()
            await self.probe.refresh()

    async def restore(self, global_step: int, lineage: int, incident: int | None) -> int:
        self.order = NoOrder()
        next_step: int = await self._within_load_s("restore", global_step, lineage, incident)
        return next_step

    async def resume(self) -> None:
        await self.call("allow")
        await self.probe.refresh()
        self._fault.resumed()
        self._await_run()

    async def pause(self, *, save: bool, within_s: float | None = None) -> None:
        """Returns when the loop has stopped: a step, and the save of a model of any size, may take their time.

        Raises TrainerError where its process ends or hangs before, ActorAway where it doesn't take the order
        within `within_s`. Any other deadline is the caller's.
        """
        await self.call("pause", save, within_s=within_s)
        await self.probe.refresh()
        while self.view.is_running or self.view.is_allowed:
            verdict = self._verdict()
            if verdict.health is Health.DEAD:
                raise TrainerError(f"the trainer did not stop: {verdict.reason}")
            await asyncio.sleep(SOON_S)
            await self.probe.refresh()

    async def call(self, method: str, *arguments: Any, within_s: float | None = None) -> Any:
        """Have its actor (actors/training/trainer.py) carry out `method`, by default within ANSWER_S."""
        within_s = ANSWER_S if within_s is None else within_s
        return await call_method(self.actor, method, *arguments, within_s=within_s, of=self.of)

    async def _within_load_s(self, method: str, *arguments: Any) -> Any:
        """An answer of what keeps it busy: past the deadline it hangs, however busy it claims to be."""
        try:
            return await self.call(method, *arguments, within_s=self._load_s)
        except ActorAway as error:
            self.order = OrderOverdue(error.message)
            raise

    async def _take_over(self) -> None:
        """The trainer's process has ended or is empty, so there is no other that could step."""
        standby = self._standby
        # An empty one is ahead of one that Ray is yet to start; the GPU it knows only when it was parked.
        if standby is not None and await standby.can_take_over(empty_too=self._has_ended and not self.view.gpus):
            self.actor = await standby.change_places(self.actor)
            self.view = NOTHING
            self._run = None
            await self.probe.refresh()

    async def _until_empty(self, *, or_ended: bool = False) -> None:
        give_up_at, killed = time.monotonic() + RESTART_S, 0
        while not (or_ended and self._has_ended):
            await self._hear(or_ended)
            is_there = self.view.pid != 0 and not self._has_ended
            if (or_ended and self._has_ended) or (is_there and not self.view.is_started and not self.view.busy):
                return
            if (is_there and self.view.pid != killed) or (killed == 0 and not self.probe.is_fresh(ANSWER_S)):
                killed = self.view.pid
                await asyncio.to_thread(ray.kill, self.actor, no_restart=False)
            if time.monotonic() > give_up_at:
                self.order = OrderOverdue(f"no empty trainer process within {RESTART_S:g} s")
                raise TrainerError(self.order.reason)
            await asyncio.sleep(SOON_S)

    async def _hear(self, or_ended: bool) -> None:
        """A question to one that Ray restarts is answered after a second or two: its end says as much, sooner."""
        asked = self.probe.tasks.start(self.probe.refresh())
        while not asked.done() and not (or_ended and self._has_ended):
            await asyncio.wait([asked], timeout=SOON_S)

    def _await_run(self) -> None:
        if self._run is None or self._run.done():
            self._run = self.probe.tasks.start(self._wait_run(self.actor, self.actor.run.remote()))

    async def _wait_run(self, actor: Any, running: Any) -> None:
        """However it ends, the view shows how; this only shows when."""
        try:
            await answer(running, within_s=float("inf"), of=self.of)
        except LauncherError as error:  # Ray reports why it ended a process
            if actor is self.actor:
                self._note_end(find_trainer_cause(str(error.__cause__).splitlines(), None))
        await self.probe.refresh()
        self._changed.set()

    def _note_end(self, found: ExitFinding, process: ProcessId | None = None, told: str = "") -> None:
        """`process` has ended, if it is given; `found` is kept only where it adds to that."""
        kept, finding = self._end, found if found.ran_out is not None else self._end.finding
        self._end = ProcessEnd(process or kept.process, finding, told or kept.told)

    async def close(self) -> None:
        await self.probe.close()
