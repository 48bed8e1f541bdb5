"""A Coordinator's trial: the actors that it supervises, and a run that collapsed."""

import asyncio
import dataclasses

import pytest

from actors.serving.server_report import ServerReport
from actors.supervision import incident_artifacts
from actors.supervision.coordinator import Coordinator
from actors.supervision.server_handle import ServerHandle
from actors.weights.start_weights import StartWeights
from launcher.base.messages import Cause, Incident, ServerExit, ServerInfo, ServerState
from launcher.policy.actions import (
    RestoreTrainer,
)
from launcher.policy.checkpoint_status import CheckpointFacts, CheckpointStatus
from launcher.run_files.journal import read_lines
from tests.support.fake_actors import Method
from tests.support.machine import scaled
from tests.support.run_memory import history_of
from tests.support.simulated_run.run_model import CONFIG, ModelHands, RunModel

ENOUGH = 30


class Trial:
    """One Coordinator over a run; a second one over the same run and journal is its successor."""

    def __init__(self, folder, run=None):
        self.run = run or RunModel()
        self.path = folder / "events.jsonl"
        self.history = history_of(self.path, 1)
        self.hands = ModelHands(self.run, self.history)
        sglang = dataclasses.replace(CONFIG.sglang, n_servers=len(self.run.servers))
        config = dataclasses.replace(CONFIG, sglang=sglang)
        self.coordinator = Coordinator(config, self.hands, self.history, clock=lambda: self.run.now)

    async def turns(self, n=ENOUGH):
        """Looks a second apart, with what was begun in each given the time to end."""
        for _ in range(n):
            self.run.now += 1.0
            await self.coordinator.turn()
            for _ in range(5):
                await asyncio.sleep(0)

    async def begun(self):
        self.history.begin()
        await self.hands.begin()
        await self.turns()
        self.hands.done.clear()
        return self

    def did(self, *kinds):
        return [action for action in self.hands.done if not kinds or isinstance(action, kinds)]

    def events(self, name):
        return [event for event in read_lines(self.path) if event["event"] == name]


def collapsed(trial):
    trial.run.step(40)
    trial.run.checkpoints = tuple(
        CheckpointFacts(global_step=step, status=CheckpointStatus.CANDIDATE) for step in (9, 19, 29, 39)
    )
    trial.run.incident = Incident(
        cause=Cause.REWARD_COLLAPSE, subject="policy", reason="rewards fell", since=trial.run.now, onset_step=25
    )
    return trial


async def restored_unheard(tmp_path):
    """The successor of a Coordinator that was killed after the trainer carried out its restore, before it heard so."""
    before = collapsed(await Trial(tmp_path).begun())
    before.hands.hangs.add(RestoreTrainer)
    await before.turns(6)
    before.hands._take_effect(before.did(RestoreTrainer)[0])
    after = Trial(tmp_path, before.run)
    await after.hands.begin()
    return after


SLEEPER = """
import time

def waits_for_nothing():
    print('up', flush=True)
    time.sleep(1000)

waits_for_nothing()
"""


@pytest.fixture
def patience(monkeypatch):
    """With py-spy, which takes its time on a busy machine."""
    for name in ("DEADLINE_S", "DUMP_TIMEOUT_S", "EVIDENCE_S", "CLOSE_S"):
        monkeypatch.setattr(incident_artifacts, name, scaled(60))


HUNG_AFTER_S = 30.0
WEIGHTS = StartWeights(path="model", version=3, lineage=1)


class FakeActor:
    """A server's actor; `ready` is what `wait_ready` does, `end` ends its life, `tell` is its report to the handle."""

    def __init__(self, ready=None):
        self._ready = ready
        self.state = ServerState.STOPPED
        self.generation = -1
        self.reason = ""
        self.version = None
        self.exit = None
        self.silent_s = 0.0
        for name in ("start", "stop", "wait_ready", "report"):
            setattr(self, name, Method(getattr(self, f"_{name}")))

    def _info(self):
        return ServerInfo(
            name="server-0",
            index=0,
            generation=self.generation,
            state=self.state,
            weight_version=self.version,
            reason=self.reason,
        )

    def seen(self, ordered):
        return ServerReport(ordered=ordered, info=self._info(), end=self.exit, silent_s=self.silent_s)

    def tell(self, slot):
        slot.take_report(self.seen(slot.generation))

    async def _report(self, work):
        return self.seen(work.generation)

    async def _start(self, *, generation, model_path, weight_version, overrides):
        self.generation = generation
        self.state = ServerState.STARTING
        self.exit = None
        self.version = weight_version
        return self._info()

    async def _stop(self):
        self.state = ServerState.STOPPED
        return self.seen(self.generation)

    async def _wait_ready(self):
        if self._ready is not None:
            self.state = ServerState.FAILED
            self.reason = self._ready.message
            raise self._ready
        self.state = ServerState.READY
        return self._info()

    def end(self, reason, exit_code=-9, age_s=0.0, was_told=False):
        self.state = ServerState.DEAD
        self.exit = ServerExit(
            name="server-0",
            generation=self.generation,
            pid=7,
            exit_code=exit_code,
            reason=reason,
            age_s=age_s,
            was_told=was_told,
        )


def handle(*, ready=None):
    """Of a server; with its actor, and the list of deaths that were told."""
    died = []
    actor = FakeActor(ready)
    slot = ServerHandle(
        "server-0", actor, died=died.append, changed=asyncio.Event(), setup_s=5.0, hung_after_s=HUNG_AFTER_S
    )
    return slot, actor, died


def facts(slot, pool=None, judged=None, *, is_publishing=False):
    return slot.facts(pool, judged, is_publishing=is_publishing)
