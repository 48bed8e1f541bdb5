"""The trainer of a simulated run: the project's `Training`, in a process that may be killed."""

import asyncio
import contextlib

from actors.training.training import Training
from launcher.base.errors import TrainerError
from launcher.base.messages import Cause, Health, TrainerView, Verdict
from launcher.policy.memory_backoff import Lengths
from launcher.policy.observed import TrainerFacts
from tests.sim.sim_servers import NOTICED_S, SOUND, UNKNOWN
from tests.sim.virtual_process import Process
from tests.sim.virtual_time import Killed, VirtualThread, belongs_to

TRAINER_START_S = 1.0
"""Virtual seconds."""


class SimTrainer:
    """The trainer's actor and its handle in one: the process of `Training`, and what a TrainerHandle knows of it."""

    def __init__(self, run):
        self.run = run
        self.process = None
        self.training = None
        self.busy = ""
        self.has_ended = False
        self.lengths = Lengths()
        self.incarnation = 0
        self.stepping = None
        self.breaks_restores = 0

    # the process

    def kill(self):
        self.run.truth.befell(Cause.TRAINER_CRASH)
        self.end_process()

    def end_process(self):
        if self.process is not None:
            self.process.kill()

    def end(self):
        """Its process was killed. What a thread of it was writing is written, or is not: the simulation waits for it,
        as nothing may write any more when the next one starts."""
        self.training._checkpointer.settle()
        self.training = self.stepping = None
        self.has_ended = True
        self.run.loop.call_later(NOTICED_S, self.run.changed.set)

    async def start(self, overrides):
        with belongs_to(None):
            return await asyncio.shield(asyncio.ensure_future(self._start()))

    async def _start(self):
        self.run.truth.check_restart_of_trainer(self)
        self.end_process()
        self.busy = "starting"
        try:
            await asyncio.sleep(TRAINER_START_S)
            self.incarnation += 1
            process = TrainerProcess(self)
            with belongs_to(process):
                loading = asyncio.ensure_future(self.run.loop.run_guest(self._load, process))
            try:
                self.training = await loading
            except asyncio.CancelledError:
                if not process.is_dead:
                    raise
                self.has_ended = True
                raise TrainerError("the trainer ended while it started") from None
            self.process = process
            self.has_ended = False
        finally:
            self.busy = ""
        self.run.changed.set()
        return self.training.ready()

    def _load(self, process):
        made = Training(
            self.run.config, self.run.paths, 1, ask=lambda report: self._ask(process, report), parts=self.run.parts
        )
        made._gate._stop = TurnFlag(self.run.loop, process)
        write = made._records.write

        def write_down(report):
            process.reach_moment("before the ledger's line")
            if process.is_dead:
                raise Killed
            refusal = write(report)
            process.reach_moment("after the ledger's line")
            return refusal

        made._records.write = write_down
        return made

    def _ask(self, process, report):
        answer = VirtualThread(self.run.loop, process).call(self.run.monitor.ask(report))
        self.run.truth.admitted = report.global_step if answer.admitted else None
        return answer

    @property
    def view(self):
        if self.training is None:
            return TrainerView(pid=0, busy=self.busy)
        return self.training.view()

    # its handle

    def adopt(self):
        if self.training is not None and self.view.is_allowed:
            self._begin_to_step()

    def expect(self):
        self.busy = "starting"

    async def _guest(self, function, *arguments):
        if self.training is None or self.process.is_dead:
            raise TrainerError("the trainer has ended")
        with belongs_to(self.process):
            working = asyncio.ensure_future(self.run.loop.run_guest(function, *arguments))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            if self.training is None or self.process.is_dead:
                raise TrainerError("the trainer has ended") from None
            raise

    async def restore(self, global_step, lineage, incident):
        known = self.run.monitor.incident
        if self.breaks_restores and known is not None:
            self.breaks_restores -= 1
            raise TrainerError("it could not be restored")
        restored = await self._guest(self.training.restore if self.training else None, global_step, lineage, incident)
        self.run.truth.check_restore(global_step, known)
        return restored

    async def resume(self):
        if self.training is None:
            raise TrainerError("the trainer has ended")
        self.run.truth.check_resume()
        self.training.allow()
        self._begin_to_step()

    def reward_answers(self):
        pass

    def _begin_to_step(self):
        if self.stepping is None or self.stepping.done():
            with belongs_to(self.process):
                self.stepping = asyncio.ensure_future(self._step())

    async def _step(self):
        while self.training is not None and self.view.is_allowed:  # it may be allowed again while it stops
            with contextlib.suppress(Exception):  # the view has it, and the Coordinator repairs by that
                await self.run.loop.run_guest(self.training.run)
            self.run.changed.set()

    async def pause(self, *, save, within_s=None):
        if self.training is None:
            raise TrainerError("the trainer has ended")
        self.training.pause(save=save)
        while self.training is not None and (self.view.is_running or self.view.is_allowed):
            if self.view.is_allowed and not self.view.is_running:
                self._begin_to_step()
            await asyncio.sleep(0.05)

    async def call(self, method, *arguments, within_s=None):
        if self.training is None:
            raise TrainerError("the trainer has ended")
        servers = self.training.servers
        known = {
            "set_servers": servers.set_servers,
            "send_weights": servers.send_weights,
            "admit": servers.admit,
            "limit_rollouts": servers.limit_rollouts,
            "score_canaries": self.training.score_canaries,
            "close": self.training._loop.forget,
        }
        return await self._guest(known[method], *arguments)

    def facts(self):
        view = self.view
        verdict = SOUND
        if self.busy or (self.training is None and not self.has_ended):
            verdict = UNKNOWN
        elif self.training is None:
            verdict = Verdict(health=Health.DEAD, reason="ended by SIGKILL", cause=Cause.TRAINER_CRASH)
        elif view.failure is not None:
            verdict = Verdict(health=Health.DEAD, reason=view.failure.message, cause=Cause.TRAINER_CRASH)
        return TrainerFacts(
            verdict=verdict,
            is_loaded=view.is_loaded,
            is_paused=not (view.is_allowed or view.is_running),
            policy_version=view.policy_version,
            lineage=view.lineage,
            next_step=view.next_step,
            is_publishing=view.phase == "publish",
            is_evaluating=view.phase == "evaluate",
            is_finished=view.is_finished,
        )


class TrainerProcess(Process):
    def __init__(self, trainer):
        super().__init__(trainer.run, "trainer")
        self._trainer = trainer

    def kill(self):
        super().kill()
        if self._trainer.process is self and self._trainer.training is not None:
            self._trainer.end()


class TurnFlag:
    """In place of a threading.Event: `wait` lets the virtual clock go on."""

    def __init__(self, loop, process):
        self._thread = VirtualThread(loop, process)
        self._is_set = False

    def set(self):
        self._is_set = True

    def clear(self):
        self._is_set = False

    def wait(self, timeout):
        self._thread.call(asyncio.sleep(timeout))
        return self._is_set
