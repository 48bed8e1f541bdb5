"""A Coordinator that is killed at any moment is replaced by one that brings the run to the same end.

Each scenario runs once undisturbed. Then it runs once for each moment: before each save of memory.json, between each
save and what follows, and after each action took effect, before anybody heard of it.
"""

import asyncio
import dataclasses
import time
from collections import Counter

import pytest

from actors.supervision.coordinator import Coordinator
from actors.supervision.run_history import RunHistory
from launcher.base.messages import Cause, Incident, ServerState
from launcher.policy.actions import RestartServer, RestartTrainer, RestoreTrainer
from launcher.policy.checkpoint_status import CheckpointFacts, CheckpointStatus
from launcher.policy.run_state import ENDS
from launcher.run_files.journal import read_lines
from launcher.run_files.run_memory import MemoryFile, RunMemory
from tests.support.mortal import Death, MortalFile, MortalJournal
from tests.support.simulated_run.run_model import CONFIG, ModelHands, RunModel

KINDS = (RestartServer, RestartTrainer, RestoreTrainer)
"""Orders that must not be given twice, nor get lost."""
MOMENTS = ("before a save", "after a save", "after an action")
TURNS = 60


class MortalHands(ModelHands):
    def __init__(self, run, history, death, effects, fails):
        super().__init__(run, history)
        self._death, self._effects, self.fails = death, effects, fails

    async def begin(self):
        """As a server's handle judges one whose start was never asked for."""
        for name, one in self.run.servers.items():
            if name in self.history.memory.generations and one.state is ServerState.STOPPED:
                self.run.kill_server(name)
        await super().begin()

    def is_dead(self):
        return self._death.has_come

    async def perform(self, action):
        if self._death.has_come:
            await asyncio.Event().wait()
        return await super().perform(action)

    def _take_effect(self, action):
        super()._take_effect(action)
        self._effects.append(action)
        if self._death.comes("after an action"):
            raise asyncio.CancelledError


class MortalRun:
    """A run, and one Coordinator after the other."""

    def __init__(self, folder, death):
        self.run, self.death = RunModel(), death
        self.events, self.path = folder / "events.jsonl", folder / "memory.json"
        self.effects, self.fails, self.deaths = [], Counter(), 0
        MemoryFile(self.path, "n").write(RunMemory(attempt=1))
        self._born(death)

    def _born(self, death):
        file = MortalFile(self.path, "n", lambda moment: death.has_come or death.comes(moment))
        journal = MortalJournal(self.events, 1, time.time, lambda: death.has_come)
        self.history = RunHistory(journal, file.read(1), file)
        self.hands = MortalHands(self.run, self.history, death, self.effects, self.fails)
        config = dataclasses.replace(CONFIG, sglang=dataclasses.replace(CONFIG.sglang, n_servers=len(self.run.servers)))
        self.coordinator = Coordinator(config, self.hands, self.history, clock=lambda: self.run.now)
        self._death = death

    async def begin(self):
        if not self.history.memory.was_begun:
            self.history.begin()
        self.coordinator._incidents.begin()
        await self.hands.begin()

    async def turns(self, n=TURNS):
        for _ in range(n):
            if self.history.state in ENDS:
                return
            self.run.now += 1.0
            await self.coordinator.turn()
            for _ in range(5):
                await asyncio.sleep(0)
            if self._death.has_come:
                await self._replaced()

    async def _replaced(self):
        self.deaths += 1
        await self.coordinator._drop_tasks()
        self._born(Death())
        await self.begin()

    async def end(self):
        """With the incidents that are open; one that is killed then ends the run again."""
        self.coordinator._incidents.close(self.run.now)
        self.history.save()
        if self._death.has_come:
            await self._replaced()
            await self.turns()
            self.coordinator._incidents.close(self.run.now)
            self.history.save()

    def numbers(self, event):
        return {line["incident"]: line["subject"] for line in read_lines(self.events) if line["event"] == event}


def server(run):
    run.kill_server("server-1")


def servers(run):
    for name in run.servers:
        run.kill_server(name)


def trainer(run):
    run.checkpoints = (CheckpointFacts(global_step=8, status=CheckpointStatus.CANDIDATE),)
    run.kill_trainer()


def both(run):
    server(run)
    trainer(run)


def collapse(run):
    run.step(30)
    run.checkpoints = tuple(
        CheckpointFacts(global_step=step, status=CheckpointStatus.CANDIDATE) for step in (9, 19, 29, 39)
    )
    run.incident = Incident(
        cause=Cause.REWARD_COLLAPSE, subject="policy", reason="rewards fell", since=run.now, onset_step=25
    )


async def lived(folder, befalls, death, fails):
    mortal = MortalRun(folder, death)
    await mortal.begin()
    await mortal.turns(12)
    mortal.run.step(10)
    mortal.fails.update(fails)
    mortal.effects.clear()  # a start that was never asked for is made up for by a restart
    mortal.befallen_at = mortal.run.now
    befalls(mortal.run)
    await mortal.turns()
    await mortal.end()
    return mortal


def end_of(mortal):
    run = mortal.run
    done = Counter(
        (type(action), getattr(action, "name", ""), getattr(action, "global_step", None))
        for action in mortal.effects
        if isinstance(action, KINDS)
    )
    is_current = {name: one.lineage == run.trainer.lineage for name, one in run.servers.items()}
    servers_at_end = {name: (one.state, one.weight_version, is_current[name]) for name, one in run.servers.items()}
    learned = (run.trainer.next_step, run.trainer.is_paused, run.checkpoints)
    return mortal.history.state, servers_at_end, learned, done


def spent(mortal):
    """On what befell the run."""
    return Counter((one.cause, one.subject, one.rung) for one in mortal.history.attempts if one.at > mortal.befallen_at)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    ("befalls", "fails"),
    [
        (both, {}),
        (collapse, {RestoreTrainer: 1}),
        pytest.param(server, {}, marks=pytest.mark.slow),
        pytest.param(servers, {}, marks=pytest.mark.slow),
        pytest.param(trainer, {}, marks=pytest.mark.slow),
        pytest.param(collapse, {}, marks=pytest.mark.slow),
        pytest.param(server, {RestartServer: 1}, marks=pytest.mark.slow),
        pytest.param(server, {RestartServer: 1000}, marks=pytest.mark.slow),
        pytest.param(servers, {RestartServer: 1000}, marks=pytest.mark.slow),
    ],
)
async def test_whenever_it_is_killed_the_run_comes_to_the_same_end(tmp_path, monkeypatch, befalls, fails, moment):
    monkeypatch.setattr("os.fsync", lambda fd: None)  # nothing here loses its page cache, and 10,000 take minutes
    (tmp_path / "alone").mkdir()
    alone = await lived(tmp_path / "alone", befalls, Death(), fails)
    moments = alone.death.seen[moment]
    assert moments > 3
    for number in range(1, moments + 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        killed = await lived(folder, befalls, Death(moment, number), fails)
        assert killed.deaths == 1, "the moment was met"
        assert end_of(killed) == end_of(alone), f"killed {moment}, the {number}th"
        extra = spent(killed) - spent(alone)
        assert all(times == 1 for times in extra.values()), "an order that was not carried out may count, once"
        began, ended = killed.numbers("incident.began"), killed.numbers("incident.ended")
        assert began == ended, "each incident has one number, and its end"
        assert sorted(began) == [*range(1, len(began) + 1)]
