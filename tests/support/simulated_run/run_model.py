"""A run as a Coordinator meets it, without processes: what each action changes, and which of them fail or take long."""

import asyncio
import dataclasses
from collections import Counter

from launcher.base.errors import ServerError
from launcher.base.messages import Cause, Health, ServerState, Verdict
from launcher.config.schema import RunConfig
from launcher.policy.actions import (
    AbandonServer,
    AdmitServer,
    Halt,
    LoadWeights,
    PauseTrainer,
    RestartServer,
    RestartTrainer,
    RestoreTrainer,
    ResumeTrainer,
)
from launcher.policy.memory_backoff import MemorySettings
from launcher.policy.observed import Observed, ServerFacts, TrainerFacts

CONFIG = RunConfig(experiment_name="model")
ALIVE = Verdict(health=Health.HEALTHY, reason="alive")
STARTING = Verdict(health=Health.UNKNOWN, reason="starting")
MEMORY = MemorySettings.of(CONFIG, longest_sequence=100, on_gpu=False, shares_gpu=False)


def killed(cause):
    return Verdict(health=Health.DEAD, reason="ended by SIGKILL", cause=cause)


class RunModel:
    """The living part of a run, which outlives its Coordinator."""

    def __init__(self, servers=2):
        names = [f"server-{i}" for i in range(servers)]
        self.servers = {n: ServerFacts(name=n, state=ServerState.STOPPED, verdict=STARTING) for n in names}
        self.trainer = TrainerFacts(
            verdict=STARTING, is_loaded=False, is_paused=True, policy_version=0, lineage=0, next_step=0
        )
        self.incident = None
        self.checkpoints = ()
        self.is_stopped = False
        self.now = 1000.0

    def server(self, name="server-0", **change):
        self.servers[name] = dataclasses.replace(self.servers[name], **change)

    def train(self, **change):
        self.trainer = dataclasses.replace(self.trainer, **change)

    def kill_server(self, name="server-0", cause=Cause.SERVER_CRASH):
        self.server(name, state=ServerState.DEAD, verdict=killed(cause))

    def kill_trainer(self):
        self.train(verdict=killed(Cause.TRAINER_CRASH), is_loaded=False)

    def step(self, n=1):
        """The trainer steps, and publishes to the servers that are READY."""
        self.train(next_step=self.trainer.next_step + n, policy_version=self.trainer.policy_version + n)
        for name, server in self.servers.items():
            if server.state is ServerState.READY:
                self.server(name, weight_version=self.trainer.policy_version)


class ModelHands:
    """Acts on a RunModel. `fails`: how often an action's kind fails next; `hangs`: kinds that do not end. `reads`: how
    often the checkpoints were asked for."""

    def __init__(self, run, history):
        self.run = run
        self.history = history
        self.changed = asyncio.Event()
        self.done = []
        self.fails = Counter()
        self.hangs = set()
        self.patience_s = 60.0
        self.reads = 0

    async def begin(self):
        for name, server in self.run.servers.items():
            if self.history.memory.generations.get(name, -1) < 0:
                self.history.started_server(name, 0, 0, 1)
                await self.history.flush()
                assert server.state is ServerState.STOPPED
                self.run.server(name, state=ServerState.STALE, verdict=ALIVE, weight_version=0, lineage=1)
        if self.run.trainer.verdict == STARTING:
            self.run.train(verdict=ALIVE)

    async def observe_run(self, *, with_checkpoints=False):
        run = self.run
        self.reads += with_checkpoints
        return Observed(
            servers=tuple(run.servers.values()),
            trainer=run.trainer,
            checkpoints=run.checkpoints if with_checkpoints else None,
            memory=MEMORY,
            incident=run.incident,
            is_stopped=run.is_stopped,
        )

    def deadline_s(self, action):
        return self.patience_s

    async def perform(self, action):
        self.done.append(action)
        if type(action) in self.hangs:
            await asyncio.Event().wait()
        if self.fails[type(action)]:
            self.fails[type(action)] -= 1
            raise ServerError("it did not work")
        self._take_effect(action)
        return {"pid": 1}

    async def close(self):
        pass

    def _take_effect(self, action):
        run = self.run
        match action:
            case PauseTrainer():
                run.train(is_paused=True)
            case ResumeTrainer():
                run.train(is_paused=False)
            case RestartTrainer():
                run.train(verdict=ALIVE, is_loaded=False, is_paused=True)
            case RestoreTrainer(global_step=step, condemn_after=damaged):
                if damaged is not None:
                    run.checkpoints = tuple(c for c in run.checkpoints if c.global_step <= damaged)
                run.train(is_loaded=True, next_step=step + 1, policy_version=step + 1, lineage=self.history.lineage)
                run.incident = None
                if action.restore_count is not None:
                    self.history.took_restore({"restore_count": action.restore_count})
            case RestartServer(name=name):
                run.server(name, state=ServerState.STALE, verdict=ALIVE, weight_version=0, lineage=None)
            case LoadWeights(name=name, version=version, lineage=lineage):
                run.server(name, weight_version=version, lineage=lineage)
            case AdmitServer(name=name):
                run.server(name, state=ServerState.READY)
            case AbandonServer(name=name):
                run.server(name, state=ServerState.FAILED)
            case Halt():
                run.is_stopped = True
