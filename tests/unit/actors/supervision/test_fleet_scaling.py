"""Servers join and leave: who, when, and that a Coordinator that is killed meanwhile changes nothing of it."""

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest

from actors.supervision.fleet_record import FleetRecord
from actors.supervision.fleet_scaling import FleetScaling
from actors.supervision.run_history import RunHistory
from actors.supervision.server_handle import ServerHandle
from launcher.base.errors import LauncherError, RunError, ServerError, UsageError
from launcher.base.messages import Cause, ServerState, TrainerView
from launcher.config.schema import RunConfig
from launcher.policy.actions import AbandonServer, AdmitServer, Halt, JoinServer, LeaveServer, RestartServer
from launcher.policy.reconcile_fleet import FleetChange, change_to
from launcher.policy.restart_budget import Rung
from launcher.run_files.journal import Journal, read_lines
from tests.support.fake_actors import FakeActor, never
from tests.support.simulated_run.looks import CRASHED, attempts, dead, decide, fresh, kinds, observed, server, trainer
from tests.support.simulated_run.run_model import ModelHands, RunModel
from tests.unit.actors.supervision.test_coordinator import Trial

ASKED = {"s0": "an operator's order"}

# ── the plan ──


def test_who_was_asked_to_join_joins_once():
    seen = observed(server(0), joining=("s1",))
    assert decide(seen).actions == (JoinServer(name="s1"),)
    assert decide(observed(server(0), joining=("s1",), under_way=(JoinServer(name="s1"),))).actions == ()
    assert decide(observed(server(0), server(1), joining=("s1",))).actions == ()
    assert decide(observed(server(0), joining=("s1",), leaving={"s1": "never mind"})).actions == (
        LeaveServer(name="s1", reason="never mind"),
    )


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
        ((server(0), server(1), fresh(2, ServerState.STARTING)), True),
        ((server(0), server(1, ServerState.SUSPECT)), False),
        ((server(0), server(1, verdict=CRASHED)), False),
    ],
)
def test_who_was_asked_to_leave_leaves_while_another_one_serves_or_when_it_is_dead(servers, leaves):
    made = decide(observed(*servers, leaving=ASKED))
    assert (LeaveServer(name="s0", reason=ASKED["s0"]) in made.actions) is leaves
    assert ("s0 leaves when another one serves" in made.reason) is not leaves


def test_while_weights_are_handed_out_the_others_serve_with_those_they_have():
    publishing = trainer(is_publishing=True)
    made = decide(observed(server(0), server(1, weight_version=40), trainer=publishing, leaving=ASKED))
    assert made.actions == (LeaveServer(name="s0", reason=ASKED["s0"]),)


def test_one_that_leaves_is_neither_mended_nor_counted_on():
    for leaving in (dead(0), fresh(0), server(0, weight_version=3), server(0, ServerState.STALE)):
        made = decide(observed(leaving, server(1), leaving=ASKED))
        assert kinds(made) == [LeaveServer] and made.attempts == ()

    used_up = attempts(*[Rung.SERVER] * 50, cause=Cause.SERVER_CRASH, subject="s1")
    last = decide(observed(server(0), dead(1), leaving=ASKED), used_up)
    assert AbandonServer not in kinds(last), "who leaves is no reason to give up the last one that stays"


def test_weights_that_the_trainer_is_sending_by_itself_are_not_sent_again():
    behind = server(0, weight_version=40, is_loading=True)
    assert decide(observed(behind, server(1))).actions == ()
    late = server(0, weight_version=40)
    assert decide(observed(late, server(1))).actions != ()
    assert kinds(decide(observed(dead(0, is_loading=True), server(1)))) == [RestartServer]


# ── the record ──


def test_a_name_is_never_given_twice():
    record = FleetRecord()
    for event, name in [("join_asked", "server-2"), ("leave_asked", "server-2"), ("left", "server-2")]:
        record.take({"event": f"server.{event}", "subject": name, "reason": "why"})
    first = ["server-0", "server-1"]
    assert record.members(first) == first
    assert record.next_name(first) == "server-3"
    assert (record.leaving, record.left) == ({}, {"server-2"})


# ── the Coordinator ──


class FleetModel(ModelHands):
    """In which servers join and leave."""

    def _take_effect(self, action):
        match action:
            case JoinServer(name=name):
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


async def test_join_and_leave_across_a_killed_coordinator(tmp_path):
    trial = await FleetTrial(tmp_path, RunModel(servers=1)).begun()
    assert trial.coordinator.add_server("by order") == "server-1"
    successor = FleetTrial(tmp_path, trial.run)  # the first one was killed before it did anything
    await successor.hands.begin()
    await successor.turns()
    assert successor.run.servers["server-1"].state is ServerState.READY
    assert [type(a) for a in successor.did(JoinServer, AdmitServer)] == [JoinServer, AdmitServer]
    successor.coordinator.remove_server("server-0", "by order")
    successor.coordinator.remove_server("server-0", "twice changes nothing")
    third = FleetTrial(tmp_path, trial.run)
    await third.turns()
    assert list(third.run.servers) == ["server-1"]
    assert third.coordinator.add_server("one more") == "server-2"
    assert [e["subject"] for e in third.events("server.left")] == ["server-0"]
    assert third.events("incident.began") == []


@pytest.mark.parametrize(
    ("servers", "staying", "without", "joins", "leaves"),
    [
        (2, ["server-0", "server-1"], [], 0, ()),
        (4, ["server-0", "server-1"], [], 2, ()),
        (1, ["server-0", "server-1", "server-2"], [], 0, ("server-1", "server-2")),
        (2, ["server-0", "server-1"], ["server-0"], 1, ("server-0",)),
        (1, ["server-0", "server-1", "server-2"], ["server-1"], 0, ("server-1", "server-2")),
        (1, ["server-0"], ["server-7"], 0, ()),
    ],
)
def test_how_a_fleet_changes_to_a_size(servers, staying, without, joins, leaves):
    assert change_to(servers, staying, without=without) == FleetChange(joins=joins, leaves=leaves)


async def test_a_fleet_gets_the_size_that_is_wanted_and_asking_again_changes_nothing(tmp_path):
    trial = await FleetTrial(tmp_path, RunModel(servers=1)).begun()
    for _ in range(3):
        trial.coordinator.resize(1, without=("server-0",), reason="by order")
        await trial.turns()
    trial.coordinator.abort("by order")
    trial.coordinator.resize(5, without=(), reason="too late")
    assert [e["subject"] for e in trial.events("server.join_asked")] == ["server-1"]
    assert [e["subject"] for e in trial.events("server.left")] == ["server-0"]


async def test_what_can_not_be_is_refused_with_the_reason(tmp_path):
    trial = await FleetTrial(tmp_path, RunModel(servers=1)).begun()
    trial.coordinator.add_server("by order")
    with pytest.raises(UsageError, match=r"no server 'server-7'[\s\S]*server-0, server-1"):
        trial.coordinator.remove_server("server-7", "by order")
    trial.coordinator.remove_server("server-1", "by order")
    with pytest.raises(UsageError, match=r"server-0 is the only server that stays"):
        trial.coordinator.remove_server("server-0", "by order")
    trial.coordinator.abort("by order")
    with pytest.raises(UsageError, match="the run is ending"):
        trial.coordinator.add_server("by order")


# ── the hands ──


class Fleet:
    def __init__(self, folder, *, actor=None, drain=None, start=None, find=None):
        self.path = folder / "events.jsonl"
        self.history = RunHistory(Journal(self.path, 1))
        self.changed = asyncio.Event()
        self.drains = []
        actor = actor or FakeActor(info=never, stop=None)

        async def call(method, name, drain_s, *, within_s):
            assert method == "drain_server" and within_s > drain_s
            self.drains.append((name, drain_s))
            if drain is not None:
                raise drain
            return 2

        def add_slot(name, actor):
            self.eyes.slots[name] = ServerHandle(name, actor, died=lambda end: None, changed=self.changed, setup_s=1.0)
            return self.eyes.slots[name]

        async def begin(slot):
            if start is not None:
                if isinstance(start, LauncherError):
                    slot.not_started(start.message)
                raise start

        self.eyes = SimpleNamespace(
            changed=self.changed,
            slots={},
            add_slot=add_slot,
            trainer=SimpleNamespace(view=TrainerView(pid=1), call=call),
        )
        self.hands = FleetScaling(
            RunConfig(experiment_name="fleet"), self.history, self.eyes, start=begin, find=find or (lambda name: actor)
        )

    def events(self):
        return [(event["event"], event["subject"]) for event in read_lines(self.path)]


async def test_the_hands_take_in_and_let_go(tmp_path):
    looked = []

    def find(name):  # the driver makes it a moment later
        looked.append(name)
        if len(looked) < 3:
            raise ValueError("no actor of that name")
        return FakeActor(info=never, stop=None)

    fleet = Fleet(tmp_path, find=find)
    assert await fleet.hands.join("server-4") == {"servers": 1}
    assert await fleet.hands.leave("server-4") == {"moved": 2, "servers": 0}
    assert fleet.drains == [("server-4", 60.0)]
    assert await fleet.hands.leave("server-4") == {"moved": 0, "servers": 0}, "done again after a restart"
    await fleet.hands.close()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UsageError("port 30001 is in use", "choose another sglang.port"), "port 30001"),
        (KeyError("a defect"), "a defect"),
    ],
)
async def test_a_joining_server_that_does_not_start_is_the_plans_to_mend_and_ends_no_run(tmp_path, error, said):
    fleet = Fleet(tmp_path, start=error)
    await fleet.hands.join("server-4")
    await asyncio.wait_for(fleet.changed.wait(), 10)
    slot = fleet.eyes.slots["server-4"]
    seen = slot.facts(None, None, is_publishing=False)
    await fleet.hands.close()
    await slot.close()
    assert seen.state is ServerState.DEAD and said in seen.verdict.reason
    assert fleet.events() == [("start.failed", "server-4")]
    assert Halt not in kinds(decide(observed(server(0), dead(1))))


async def test_a_server_leaves_also_where_trainer_and_actor_are_away(tmp_path):
    async def stop():
        raise RunError("its actor has died")

    fleet = Fleet(tmp_path, actor=FakeActor(info=never, stop=stop), drain=ServerError("no trainer"))
    await fleet.hands.join("server-4")
    assert await fleet.hands.leave("server-4") == {"moved": 0, "servers": 0}
    await fleet.hands.close()
    assert fleet.events() == [("actor.stop_failed", "server-4")]


def test_an_actor_that_nobody_makes_is_said(tmp_path, monkeypatch):
    def nobody(name):
        raise ValueError("no actor of that name")

    monkeypatch.setattr("actors.supervision.fleet_scaling.ACTOR_S", 0.01)
    with pytest.raises(ServerError, match=r"no actor was made for server-4"):
        asyncio.run(Fleet(tmp_path, find=nobody).hands.join("server-4"))


def test_a_trainer_that_is_away_keeps_nobody(tmp_path):
    assert kinds(decide(observed(server(0), server(1), leaving=ASKED, trainer=trainer(is_publishing=True)))) == [
        LeaveServer
    ]
