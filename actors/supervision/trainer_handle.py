"""The trainer as the Coordinator's hands hold it: its actor, what it last said, the end of its process or of its loop.

A process that ends is heard of by its pidfd, in milliseconds; Ray then starts an empty one under the same name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from actors.cluster.actor_calls import ActorAway, answer
from actors.cluster.fencing import MARGIN_S
from actors.cluster.node_identity import is_here
from actors.monitoring.trainer_watch import TrainerWatch
from actors.processes.exit_watch import process_ended
from actors.serving.server_log_tail import size_of
from actors.supervision.actor_probe import ActorProbe
from actors.supervision.trainer_exit import why_it_ended
from actors.supervision.trainer_fault import NOT_OF_THE_PROCESS, TrainerFault, cause_of
from launcher.base.errors import LauncherError, TrainerError
from launcher.base.messages import Cause, Health, Incident, Overrides, ServerInfo, TrainerReady, TrainerView, Verdict
from launcher.config.supervision import HealthConfig
from launcher.policy.canary_policy import CanaryRound
from launcher.policy.exit_cause import ExitFinding, find_trainer_cause
from launcher.policy.memory_backoff import Lengths
from launcher.policy.observed import TrainerFacts
from launcher.resources.hardware import OomKillWatch

ANSWER_S = 3.0
LOOK_S = 1.0
"""Between two questions to the trainer; its end, and that of its loop, are heard of at once."""
SOON_S = 0.05
RESTART_S = 60.0
NOTHING = TrainerView(pid=0)
Life = tuple[str, int]
"""Node and pid: on another node the same pid is another process."""


class TrainerHandle:
    """`ended` hears why a process ended."""

    def __init__(
        self,
        actor: Any,
        *,
        ended: Callable[[str], None],
        changed: asyncio.Event,
        health: HealthConfig,
        log: Path,
        lease_s: float | None = None,
    ) -> None:
        """`log`: what it wrote; a process that found no memory may say so there and nowhere else.

        `lease_s`: for how long a life that was cut off may still step; None where none can be.
        """
        self.view = NOTHING
        self.lengths = Lengths()
        self._actor = actor
        self._ended = ended
        self._changed = changed
        self._log, self._log_read = log, 0
        self._load_s = health.trainer_first_s
        self._look_s = health.look_interval_s
        self._life = TrainerWatch(health)
        self._dead: Life = ("", -1)
        self._lease_s = lease_s
        self._fenced_until = 0.0
        self._last_words: ExitFinding | None = None
        self._kills = OomKillWatch()
        self._watched: Life = ("", 0)
        self._is_ordered = False
        self._overdue = ""
        self._busy, self._busy_since = "", 0.0
        self._trouble = TrainerFault()
        self._run: asyncio.Task[None] | None = None
        self.probe = ActorProbe(self._ask_view, heard=self._take_view)

    # ── seeing ──

    def begin_looking(self) -> None:
        self.probe.begin(lambda: LOOK_S)
        self.probe.tasks.start(self._judge_always())

    def expect(self) -> None:
        """It is about to be started: that it is empty means nothing."""
        self._is_ordered = True

    def adopt(self) -> None:
        """Wait for the end of a loop that an earlier Coordinator set going: a second `run` waits for the first."""
        if self.view.is_allowed:
            self._await_run()

    async def _ask_view(self) -> tuple[TrainerView, int]:
        """With the size of its log before it was asked: up to there all is well, if the answer says so."""
        log_bytes = size_of(self._log)
        return await answer(self._actor.view.remote(), within_s=ANSWER_S, of="the trainer"), log_bytes

    def _take_view(self, answered: tuple[TrainerView, int]) -> None:
        view, log_bytes = answered
        if self.view.pid and view.node != self.view.node:
            self.fence()
        self.view = view
        self.lengths = self.lengths.updated(view.longest_sequence, view.largest_micro_batch)
        if view.is_started:
            self._kills.look(view.pid if is_here(view.node) else None)
        if view.failure is None:
            self._log_read = log_bytes
        self._watch(_life_of(view))
        if view.busy != self._busy:
            self._busy, self._busy_since = view.busy, self.probe.answered_at
        if view.is_allowed:  # perhaps by a question whose answer was lost: somebody must say `run`
            self._await_run()

    def lost_with_node(self, node: str, reason: str) -> bool:
        """A node is lost; whether the trainer was on it. It may step on behind a partition until its lease is over."""
        if not node or self.view.node != node:
            return False
        self._dead = _life_of(self.view)
        self._last_words = ExitFinding(cause=Cause.NODE_LOST, reason=reason)
        self.fence()
        self._ended(reason)
        self._changed.set()
        return True

    def _why_homeless(self) -> str:
        said = self._last_words
        return said.reason if said is not None and said.cause is Cause.NODE_LOST else "no node has room for the trainer"

    def fence(self) -> None:
        """What of the trainer was on a lost node may live on there, until its lease is over: begin nothing before."""
        if self._lease_s is not None:
            self._fenced_until = time.monotonic() + self._lease_s + MARGIN_S

    def facts(self, homeless_since: float | None = None) -> TrainerFacts:
        self.probe.tasks.check()
        view, verdict = self.view, self._verdict()
        if homeless_since is not None and not self._is_ordered:
            verdict = Verdict(health=Health.DEAD, reason=self._why_homeless(), cause=Cause.NODE_LOST)
        failure = view.failure
        found = find_trainer_cause([f"{failure.kind}: {failure.message}"], None) if failure is not None else None
        is_there = view.is_started and _life_of(view) != self._dead
        if not is_there:
            found = self._last_words
        answers = is_there and not self._is_ordered and verdict.health is not Health.DEAD
        return TrainerFacts(
            verdict=verdict,
            is_loaded=view.is_loaded and answers,
            is_paused=not (view.is_allowed or view.is_running),
            policy_version=view.policy_version,
            lineage=view.lineage,
            next_step=view.next_step,
            is_publishing=view.phase == "publish",
            is_finished=view.is_finished and answers,
            ran_out=None if found is None else found.ran_out,
            homeless_since=homeless_since,
        )

    def incident(self, now: float) -> Incident | None:
        """Found by the loop itself, and no fault of its process (actors/supervision/trainer_fault.py)."""
        return self._trouble.incident(self.view.failure, now)

    def reward_answers(self) -> None:
        """Known answers were scored as they should be: the step that failed for want of a reward may be tried again."""
        self._trouble.reward_answers(self.view.failure)

    def _verdict(self) -> Verdict:
        view = self.view
        if self._is_ordered or view.busy or view.pid == 0:
            if not self._is_ordered and _life_of(view) != self._dead and (reason := self._late()):
                return Verdict(health=Health.DEAD, reason=reason, cause=Cause.TRAINER_HANG)
            return Verdict(health=Health.UNKNOWN, reason=view.busy or "starting")
        if _life_of(view) == self._dead or not view.is_started:
            said = self._last_words
            if said is not None:
                return Verdict(health=Health.DEAD, reason=said.reason, cause=said.cause)
            return Verdict(health=Health.DEAD, reason="its process ended", cause=Cause.TRAINER_CRASH)
        cause = cause_of(view.failure)
        if view.failure is not None and cause not in NOT_OF_THE_PROCESS:
            return Verdict(health=Health.DEAD, reason=view.failure.message, cause=cause)
        return self._life.verdict()

    def _late(self) -> str:
        """Why what it is busy with, by order, takes too long; "" where it does not. Who gave the order may be gone."""
        busy_s = time.monotonic() - self._busy_since
        if not self._overdue and self._busy and busy_s > self._load_s:
            return f"{self._busy} for {busy_s:.0f} s, more than {self._load_s:g} s (health.trainer_first_s)"
        return self._overdue

    async def _judge_always(self) -> None:
        """Beside the questions, so that one that is not answered is seen to be none."""
        while True:
            self._life.look(self.view, heard_at=self.probe.answered_at, is_asked=self.probe.is_waiting)
            await asyncio.sleep(self._look_s)

    def _watch(self, life: Life) -> None:
        """One on another node is heard of by Ray alone: its calls fail, and another life answers."""
        if life != self._watched:
            self._watched = life
            if is_here(life[0]):
                self.probe.tasks.start(self._wait_end(life))

    async def _wait_end(self, life: Life) -> None:
        pid = life[1]
        if await process_ended(pid):
            if not self._is_ordered:
                self._ended(f"process {pid} ended")
            killed, since = self._kills.risen(), self._log_read
            self._note_end(await why_it_ended(*life, oom_kills=killed, log=self._log, since=since))
            self._dead = life
            self._changed.set()

    # ── acting; each raises LauncherError ──

    async def start(self, overrides: Overrides) -> TrainerReady:
        """Have an empty process load everything; one that isn't empty is ended first, and Ray starts another."""
        self._is_ordered, self._overdue = True, ""
        try:
            await asyncio.sleep(max(0.0, self._fenced_until - time.monotonic()))
            await self._until_empty()
            self._last_words = None
            ready: TrainerReady = await self._within(self._actor.start.remote(dict(overrides)), self._load_s)
            return ready
        except LauncherError as error:
            self._note_end(find_trainer_cause([error.message], None))
            raise
        finally:
            self._is_ordered = False
            await self.probe.refresh()

    async def restore(self, global_step: int, lineage: int) -> int:
        self._overdue = ""
        next_step: int = await self._within(self._actor.restore.remote(global_step, lineage), self._load_s)
        return next_step

    async def resume(self) -> None:
        await self._ask(self._actor.allow.remote())
        await self.probe.refresh()
        self._trouble.goes_on()
        self._await_run()

    async def pause(self, *, save: bool) -> None:
        """Returns when the loop stands: a step, and the save of a model of any size, may take their time.

        Raises TrainerError where its process ends or hangs before. Any other deadline is the caller's.
        """
        await self._ask(self._actor.pause.remote(save))
        await self.probe.refresh()
        while self.view.is_running or self.view.is_allowed:
            verdict = self._verdict()
            if verdict.health is Health.DEAD:
                raise TrainerError(f"the trainer did not stand still: {verdict.reason}")
            await asyncio.sleep(SOON_S)
            await self.probe.refresh()

    async def set_servers(self, servers: Sequence[ServerInfo]) -> None:
        await self._ask(self._actor.set_servers.remote(list(servers)))

    async def limit_rollouts(self, max_concurrent: int) -> None:
        await self._ask(self._actor.limit_rollouts.remote(max_concurrent))

    async def send_weights(self, server: ServerInfo, lineage: int, *, within_s: float) -> int:
        version: int = await self._ask(self._actor.send_weights.remote(server, lineage), within_s)
        return version

    async def admit(self, server: ServerInfo, *, within_s: float) -> float:
        distance: float = await self._ask(self._actor.admit.remote(server), within_s)
        return distance

    async def drain_server(self, name: str, *, within_s: float) -> int:
        """Beyond `within_s` it only has to let go of what was not answered."""
        moved: int = await self._ask(self._actor.drain_server.remote(name, within_s), within_s + ANSWER_S)
        return moved

    async def score_canaries(self) -> CanaryRound:
        scored: CanaryRound = await self._ask(self._actor.score_canaries.remote(), RESTART_S)
        return scored

    async def close_training(self) -> None:
        await self._ask(self._actor.close.remote())

    async def _ask(self, call: Any, within_s: float = ANSWER_S) -> Any:
        return await answer(call, within_s=within_s, of="the trainer")

    async def _within(self, call: Any, within_s: float) -> Any:
        """As `_ask`, of what keeps it busy: past its deadline it hangs, however busy it says it is."""
        try:
            return await self._ask(call, within_s)
        except ActorAway as error:
            self._overdue = error.message
            raise

    async def _until_empty(self) -> None:
        give_up_at = time.monotonic() + RESTART_S
        await self.probe.refresh()
        told = 0
        while self._is_not_there() or self.view.is_started or self.view.busy:
            stale = not self.probe.is_fresh(ANSWER_S)
            if (not self._is_not_there() and self.view.pid != told) or (stale and told == 0):
                told = self.view.pid
                await asyncio.to_thread(ray.kill, self._actor, no_restart=False)
            if time.monotonic() > give_up_at:
                self._overdue = f"no empty trainer process within {RESTART_S:g} s"
                raise TrainerError(self._overdue)
            await asyncio.sleep(SOON_S)
            await self.probe.refresh()

    def _is_not_there(self) -> bool:
        return self.view.pid == 0 or _life_of(self.view) == self._dead

    def _await_run(self) -> None:
        if self._run is None or self._run.done():
            self._run = self.probe.tasks.start(self._wait_run(self._actor.run.remote()))

    async def _wait_run(self, running: Any) -> None:
        """However it ends, the view says how; this only says when."""
        try:
            await answer(running, within_s=float("inf"), of="the trainer")
        except LauncherError as error:  # Ray says what it ended a process for
            self._note_end(find_trainer_cause(str(error.__cause__).splitlines(), None))
        await self.probe.refresh()
        self._changed.set()

    def _note_end(self, found: ExitFinding) -> None:
        """Only what tells more than that it ended."""
        if found.ran_out is not None:
            self._last_words = found

    async def close(self) -> None:
        await self.probe.close()


def _life_of(view: TrainerView) -> Life:
    return view.node, view.pid
