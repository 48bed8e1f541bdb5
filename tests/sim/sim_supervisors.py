"""HealthMonitor and Coordinator of a simulated run, each of which may be killed, and what the Coordinator sees."""

import asyncio
import contextlib
import dataclasses
import types

from actors.cluster.node_identity import this_node
from actors.monitoring.health_monitor import HealthMonitor
from actors.monitoring.reward_series import RewardSeries
from actors.supervision.action_executor import ActionExecutor
from actors.supervision.checkpoint_scan import CheckpointScan
from actors.supervision.cluster_observer import ClusterObserver
from actors.supervision.coordinator import Coordinator
from actors.supervision.coordinator_actor import take_place
from actors.supervision.oom_backoff import OomBackoff
from actors.supervision.run_history import ProgressTracker, RunHistory, furthest_step
from actors.training.admission_gate import MonitorAway
from launcher.base.messages import ServerState
from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog
from launcher.policy.memory_backoff import Lengths
from launcher.policy.observed import TRAINER, Observed
from tests.sim.sim_disks import SimDiskWatch
from tests.sim.virtual_process import Process
from tests.sim.virtual_time import belongs_to
from tests.support.mortal import MortalFile, MortalJournal

# ── HealthMonitor ──


async def _nobody(name, work, hold_s):
    """The monitor is given no server to ask."""
    raise AssertionError(name)


class SimMonitor:
    """The HealthMonitor's actor and its handle: of the servers it knows nothing here, of the rewards all."""

    def __init__(self, run):
        self.run = run
        self.process = None
        self.monitor = None
        self._begin()

    def _begin(self):
        run = self.run
        self.process = Process(run, "monitor")
        journal = MortalJournal(run.paths.events, 1, lambda: run.loop.now, self.process.has_ended)
        series = RewardSeries.read(run.paths)
        self.monitor = HealthMonitor(run.config, journal, _nobody, series=series, clock=lambda: run.loop.now)

    def kill(self):
        self.process.is_dead = True
        self.monitor = None
        self.run.loop.call_later(1.0, self._begin)

    async def ask(self, report):
        if self.monitor is None:
            raise MonitorAway("it was killed")
        self.process.reach_moment("before an answer")
        if self.process.is_dead:
            self.kill()
            raise MonitorAway("it was killed")
        answer = self.monitor.admit(report)
        self.process.reach_moment("after an answer")
        if self.process.is_dead:
            self.kill()
            raise MonitorAway("it was killed")
        self.run.changed.set()
        return answer

    @property
    def is_heard(self):
        return self.monitor is not None

    @property
    def incident(self):
        return None if self.monitor is None else self.monitor.report().incident

    @property
    def lower_level(self):
        return None if self.monitor is None else self.monitor.report().lower_level

    async def canaries(self, scored):
        if self.monitor is not None:
            self.monitor.canaries(scored)

    async def trust(self, name):
        if self.monitor is not None:
            self.monitor.trust(name)

    async def restored(self, global_step, onset_step, lineage):
        if self.monitor is not None:
            self.monitor.restored(global_step, onset_step, lineage)

    async def release(self):
        pass


# ── what the Coordinator sees ──


class SimObserver:
    """In place of the ClusterObserver, for one Coordinator."""

    has_trainer = True

    def __init__(self, run, history):
        self.changed = run.changed
        self.run = run
        self.slots = run.servers
        self.trainer = run.trainer
        self.monitor = run.monitor
        self.memory = OomBackoff(run.config, history, None, on_gpu=False, shares_gpu=False)
        self.catalog = CheckpointCatalog.of_run(run.config, run.paths)
        self.checkpoints = CheckpointScan(
            lambda: self.catalog.facts(-1, dict(history.memory.damaged_checkpoints)),
            unreadable=lambda reason: None,
            patience_s=60.0,
        )
        self.loads = types.SimpleNamespace(loads=lambda name: contextlib.nullcontext())
        self._progress = ProgressTracker(history, furthest_step(run.paths.metrics, 1))
        self.disks = SimDiskWatch(run)
        self._history = history
        self._was_at = self._stepped_at = None

    async def refresh(self):
        self.checkpoints.invalidate()

    def begin_looking(self):
        pass

    def ran_out(self, slot):
        return None

    def incident(self, now):
        return self.monitor.incident

    async def observe_run(self, *, is_stopped, with_checkpoints=False):
        found = await self.checkpoints.read() if with_checkpoints else None
        view, trainer = self.trainer.view, self.trainer.facts()
        in_pool = {one.name: one for one in view.servers}
        self._progress.note(
            trainer.next_step, [n for n, s in in_pool.items() if s.state is ServerState.READY], self.run.loop.now
        )
        ClusterObserver._note_step(self, trainer, self.run.loop.now)
        self.disks.refused(view.refusal)
        self.disks.refused(self._history.refusal)
        if found is not None:
            healthy_until = trainer.next_step - 1
            found = tuple(
                dataclasses.replace(one, status=self.catalog.status_at(one.global_step, healthy_until)) for one in found
            )
        return Observed(
            servers=tuple(
                dataclasses.replace(
                    server.facts(in_pool.get(name), is_publishing=trainer.is_publishing or name in view.loading),
                    is_loading=name in view.loading,
                    progress_at=self._progress.at(name),
                )
                for name, server in self.slots.items()
            ),
            trainer=trainer,
            checkpoints=found,
            memory=self.memory.settings(Lengths()),
            incident=self.incident(self.run.loop.now),
            is_judged=self.monitor.is_heard,
            progress_at=self._progress.at(TRAINER),
            is_stopped=is_stopped,
            evals=view.evals,
            rejections=view.rejections,
            lower_level=self.monitor.lower_level,
            disk=self.disks.trouble(
                self.run.loop.now, stepped_at=self._stepped_at, patient=view.is_saving and view.is_running
            ),
        )

    async def close(self):
        self.checkpoints.close()
        self.disks.close()


class SimExecutor(ActionExecutor):
    """With the moments at which its Coordinator may be killed."""

    def __init__(self, run, history, observer, process):
        super().__init__(run.config, history, observer, shares_gpu=False)
        self._process = process
        self._ordered = set()

    async def perform(self, action):
        order = type(action), getattr(action, "name", "")
        if order in self._ordered:
            self._process.run.truth.breach("P6", f"{action} was ordered while it was under way")
        self._ordered.add(order)
        try:
            facts = await super().perform(action)
        finally:
            self._ordered.discard(order)
            self._process.reach_moment("after an action")
        if self._process.is_dead:
            await asyncio.Event().wait()
        return facts


async def asks_how_it_is(journal, history):
    """The driver's ping, which tries again to write what a disk has refused."""
    while True:
        await asyncio.sleep(1.0)
        journal.write_waiting()
        history.save()


class SimCoordinator:
    """One incarnation after the other."""

    def __init__(self, run):
        self.run = run
        self.deaths = 0
        self.history = self.process = self._coordinator = self._asked = None

    async def lead(self):
        """To the run's end."""
        while True:
            self.process = process = Process(self.run, "coordinator")
            with belongs_to(process):
                working = asyncio.ensure_future(self._one_life(process))
            try:
                return await working
            except asyncio.CancelledError:
                if not process.is_dead:
                    raise
            self.deaths += 1
            await asyncio.sleep(1.0)

    async def _one_life(self, process):
        run = self.run
        file = MortalFile(run.paths.run_memory, this_node(), process.reach_moment)
        journal = MortalJournal(run.paths.events, 1, lambda: run.loop.now, process.has_ended)
        self.history = history = RunHistory(journal, await take_place(run.config, file, 1, run.paths.events), file)
        observer = SimObserver(run, history)
        executor = SimExecutor(run, history, observer, process)
        self._asked = asyncio.ensure_future(asks_how_it_is(journal, history))
        self._coordinator = Coordinator(run.config, executor, history, clock=lambda: run.loop.now)
        return await self._coordinator.run()

    def abort(self, reason):
        self._coordinator.abort(reason)

    def kill(self):
        self.process.kill()
