"""The number of servers changes while a run trains: what is missing is started, what is too many leaves, and a
Coordinator that is killed meanwhile changes nothing of it."""

import asyncio
import dataclasses
import threading
from types import SimpleNamespace

import pytest

from actors.serving.server_report import ServerReport
from actors.supervision.coordinator_actor import find_servers
from actors.supervision.fleet_scaling import FleetScaling
from actors.supervision.run_history import server_names
from actors.supervision.server_handle import ServerHandle
from launcher.base.errors import RunError, ServerError
from launcher.base.messages import Cause, ServerInfo, ServerState, TrainerView
from launcher.config.schema import RunConfig
from launcher.policy.actions import AbandonServer, AdmitServer, LeaveServer, RestartServer
from launcher.policy.restart_budget import Rung
from launcher.run_files.journal import read_lines
from tests.support.fake_actors import FakeActor
from tests.support.run_memory import history_of
from tests.support.simulated_run.looks import CRASHED, attempts, dead, decide, fresh, kinds, observed, server, trainer
from tests.support.simulated_run.run_model import ModelHands, RunModel
from tests.support.worlds.supervision import Trial

STOPPED = ServerReport(ordered=-1, info=ServerInfo(name="server-4", index=4, state=ServerState.STOPPED, generation=-1))
ONE = {"fleet": ("s1",)}
"""Of servers, s0 is too many."""
LEAVES = LeaveServer(name="s0", reason="there are to be 1 servers")

# ── the plan ──


def test_what_is_missing_is_started_once_and_costs_no_budget():
    missing = {"fleet": ("s0", "s1")}
    made = decide(observed(server(0), **missing))
    starts = RestartServer(name="s1", reason="there are to be 2 servers")
    assert (made.actions, made.attempts) == ((starts,), ())
    assert decide(observed(server(0), **missing, under_way=(starts,))).actions == ()
    assert decide(observed(server(0), server(1), **missing)).actions == ()


@pytest.mark.parametrize(
    ("servers", "leaves"),
    [
        ((server(0), server(1)), True),
        ((dead(0), server(1)), True),
        ((server(0), dead(1)), False),
        ((server(0), fresh(1)), False),
        ((server(0), server(1, weight_version=3)), False),
        ((server(0), fresh(1, ServerState.STARTING)), False),
        ((dead(0), fresh(1, ServerState.STARTING)), True),
        ((server(0), server(1, ServerState.SUSPECT)), False),
        ((server(0), server(1, verdict=CRASHED)), False),
    ],
)
def test_what_is_too_many_leaves_while_another_one_serves_or_when_it_is_dead(servers, leaves):
    made = decide(observed(*servers, **ONE))
    assert (LEAVES in made.actions) is leaves
    assert ("s0 leaves when another one serves" in made.reason) is not leaves


def test_one_that_serves_is_enough_for_another_one_to_leave():
    leaves = LeaveServer(name="s0", reason="there are to be 2 servers")
    assert leaves in decide(observed(server(0), server(1), dead(2), fleet=("s1", "s2"))).actions


def test_while_weights_are_handed_out_the_others_serve_with_those_they_have():
    publishing = trainer(is_publishing=True)
    made = decide(observed(server(0), server(1, weight_version=40), trainer=publishing, **ONE))
    assert made.actions == (LEAVES,)


def test_one_that_leaves_is_neither_mended_nor_counted_on():
    for leaving in (dead(0), fresh(0), server(0, weight_version=3), server(0, ServerState.STALE)):
        made = decide(observed(leaving, server(1), **ONE))
        assert kinds(made) == [LeaveServer]
        assert made.attempts == ()

    used_up = attempts(*[Rung.SERVER] * 50, cause=Cause.SERVER_CRASH, subject="s1")
    last = decide(observed(server(0), dead(1), **ONE), used_up)
    assert AbandonServer not in kinds(last), "who leaves is no reason to give up the last one that stays"


def test_weights_that_the_trainer_is_sending_by_itself_are_not_sent_again():
    behind = server(0, weight_version=40, is_loading=True)
    assert decide(observed(behind, server(1))).actions == ()
    late = server(0, weight_version=40)
    assert decide(observed(late, server(1))).actions != ()
    assert kinds(decide(observed(dead(0, is_loading=True), server(1)))) == [RestartServer]


# ── the record ──


def test_the_record_is_of_the_last_size_asked_for_and_of_who_has_served(tmp_path):
    history = history_of(tmp_path / "events.jsonl")
    assert history.memory.servers is None
    history.asked_to_resize(3, "by order")
    for name in server_names(3):
        history.done(AdmitServer(name=name), {}, 0.1)
    history.asked_to_resize(2, "by order")
    history.done(LeaveServer(name="server-2", reason="by order"), {"moved": 0}, 0.1)
    memory = history_of(tmp_path / "events.jsonl").memory
    assert (memory.servers, memory.served, memory.left) == (2, {"server-0", "server-1"}, {"server-2"})
    history.started_server("server-2", 0, 0, 1)
    assert history_of(tmp_path / "events.jsonl").memory.left == set(), "it is there again"


# ── the Coordinator ──


class FleetModel(ModelHands):
    """In which servers come and leave."""

    def _take_effect(self, action):
        match action:
            case RestartServer(name=name) if name not in self.run.servers:
                self.run.servers[name] = dataclasses.replace(fresh(0), name=name)
                self.history.started_server(name, 0, 0, 1)
            case LeaveServer(name=name):
                self.run.servers.pop(name, None)
            case _:
                super()._take_effect(action)


class FleetTrial(Trial):
    def __init__(self, folder, run=None):
        super().__init__(folder, run)
        self.hands = FleetModel(self.run, self.history)
        self.coordinator._cluster = self.hands


FIRST = 2
NEXT = f"server-{FIRST}"


async def test_more_and_fewer_across_killed_coordinators(tmp_path):
    trial = await FleetTrial(tmp_path, RunModel(servers=FIRST)).begun()
    trial.coordinator.resize(FIRST + 1, "by order")
    trial.history.save()
    successor = FleetTrial(tmp_path, trial.run)  # the first one was killed before it did anything
    await successor.hands.begin()
    await successor.turns()
    assert successor.run.servers[NEXT].state is ServerState.READY
    assert [type(a) for a in successor.did(RestartServer, AdmitServer)] == [RestartServer, AdmitServer]
    successor.coordinator.resize(FIRST, "by order")
    successor.history.save()
    third = FleetTrial(tmp_path, trial.run)
    await third.turns()
    assert list(third.run.servers) == list(server_names(FIRST))
    third.coordinator.resize(FIRST + 1, "again")
    await third.turns()
    assert third.run.servers[NEXT].state is ServerState.READY, "under the same name"
    assert [e["subject"] for e in third.events("server.left")] == [NEXT]
    assert third.events("incident.began") == []


async def test_asking_again_changes_nothing_and_a_run_that_ends_stays_as_it_is(tmp_path):
    trial = await FleetTrial(tmp_path, RunModel(servers=FIRST)).begun()
    for _ in range(3):
        trial.coordinator.resize(FIRST + 1, "by order")
        await trial.turns()
    trial.coordinator.abort("by order")
    trial.coordinator.resize(FIRST + 5, "too late")
    assert [e["servers"] for e in trial.events("fleet.resized")] == [FIRST + 1]


def test_one_whose_end_nobody_wrote_down_has_left(tmp_path, monkeypatch):
    """Its Coordinator was killed when its actor had ended."""
    history, there = history_of(tmp_path / "events.jsonl"), {"server-0": "actor"}
    for name in server_names(3):
        history.started_server(name, 0, 0, 1)
    history.asked_to_resize(2, "by order")

    def get_actor(name):
        if name not in there:
            raise ValueError(name)
        return there[name]

    monkeypatch.setattr("ray.get_actor", get_actor)
    config = RunConfig(experiment_name="fleet")
    assert find_servers(config, history) == there == find_servers(config, history)
    left = [event["subject"] for event in read_lines(tmp_path / "events.jsonl") if event["event"] == "server.left"]
    assert left == ["server-2"], "once, and of server-1 the actor is still to be made"


# ── the hands ──


class Fleet:
    """`late`: how many looks for its actor find none."""

    def __init__(self, folder, *, actor=None, drain=None, late=0):
        self.path = folder / "events.jsonl"
        self.history = history_of(self.path)
        self.changed = asyncio.Event()
        self.drains = []
        self.late = late
        self.actor = actor or FakeActor(stop=STOPPED)

        async def call(method, name, drain_s, *, within_s):
            assert method == "drain_server"
            assert within_s > drain_s
            self.drains.append((name, drain_s))
            if drain is not None:
                raise drain
            return 2

        def add_slot(name, actor):
            slots = self.eyes.slots
            slots[name] = ServerHandle(
                name, actor, died=lambda end: None, changed=self.changed, setup_s=1.0, hung_after_s=30.0
            )
            return slots[name]

        self.eyes = SimpleNamespace(
            slots={},
            add_slot=add_slot,
            drop_slot=lambda name: self.eyes.slots.pop(name),
            trainer=SimpleNamespace(view=TrainerView(pid=1), call=call),
        )
        self.hands = FleetScaling(self.history, self.eyes, drain_s=60.0, find=self.find, end=self.end)

    def find(self, name):
        self.late -= 1
        if self.late >= 0 or self.actor is None:
            raise ValueError("no actor of that name")
        return self.actor

    def end(self, actor):
        assert actor is self.actor
        self.actor = None

    def events(self):
        return [(event["event"], event["subject"]) for event in read_lines(self.path)]


async def test_one_that_comes_is_watched_once_it_has_an_actor_and_one_that_leaves_frees_its_name(
    tmp_path,
):
    fleet = Fleet(tmp_path, late=2)
    slot = await fleet.hands.slot_of("server-4")
    assert await fleet.hands.slot_of("server-4") is slot, "one that is there is that one"
    assert await fleet.hands.leave("server-4") == {"moved": 2, "servers": 0}
    assert fleet.drains == [("server-4", 60.0)]
    assert fleet.actor is None
    assert fleet.eyes.slots == {}


async def test_a_server_leaves_also_where_trainer_and_actor_are_away(tmp_path):
    async def stop():
        raise RunError("its actor has died")

    fleet = Fleet(tmp_path, actor=FakeActor(stop=stop), drain=ServerError("no trainer"))
    await fleet.hands.slot_of("server-4")
    fleet.actor = None
    assert await fleet.hands.leave("server-4") == {"moved": 0, "servers": 0}
    assert fleet.events() == [("actor.stop_failed", "server-4")]


async def test_one_whose_actor_does_not_end_is_ordered_to_leave_again(tmp_path):
    """Its name is not free, so that it has not left."""
    fleet = Fleet(tmp_path)
    slot = await fleet.hands.slot_of("server-4")
    fleet.hands._end = lambda actor: ended.set()
    ended = threading.Event()
    leaving = asyncio.create_task(fleet.hands.leave("server-4"))
    await asyncio.to_thread(ended.wait, 10)
    assert ended.is_set()
    assert not leaving.done()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert fleet.eyes.slots == {"server-4": slot}
