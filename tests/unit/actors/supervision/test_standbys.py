"""Standbys through the Coordinator: joined, parked and promoted, across Coordinators that are killed in between."""

import dataclasses

from actors.supervision.fleet_record import FleetRecord
from launcher.base.messages import ServerState
from launcher.config.supervision import RecoveryConfig
from launcher.policy.actions import AdmitServer, JoinServer, ParkServer, PromoteServer, RestartServer
from launcher.policy.run_state import RunState
from tests.support.simulated_run.run_model import CONFIG, RunModel
from tests.unit.actors.supervision.test_coordinator import Trial
from tests.unit.actors.supervision.test_fleet_scaling import FleetModel

WITH_ONE = dataclasses.replace(CONFIG, recovery=RecoveryConfig(standby_servers=1))


class StandbyModel(FleetModel):
    def _take_effect(self, action):
        match action:
            case ParkServer(name=name):
                self.run.server(name, state=ServerState.PARKED)
            case PromoteServer(name=name):
                self.run.server(name, state=ServerState.READY)
            case _:
                super()._take_effect(action)


class StandbyTrial(Trial):
    def __init__(self, folder, run=None):
        super().__init__(folder, run)
        self.hands = StandbyModel(self.run, self.history)
        self.coordinator._cluster, self.coordinator._config = self.hands, WITH_ONE


def states(trial):
    return {name: server.state for name, server in trial.run.servers.items()}


async def test_the_life_of_a_standby_across_killed_coordinators(tmp_path):
    first = await StandbyTrial(tmp_path, RunModel(servers=1)).begun()
    await first.turns()
    assert states(first) == {"server-0": ServerState.READY, "server-1": ServerState.PARKED}
    assert [e["subject"] for e in first.events("server.joining") + first.events("server.parked")] == ["server-1"] * 2

    second = StandbyTrial(tmp_path, first.run)
    assert second.history.fleet.standbys == {"server-1"}
    await second.hands.begin()
    await second.turns()
    assert not second.did(JoinServer, ParkServer, PromoteServer, RestartServer), "it has adopted what there is"

    second.run.kill_server("server-0")
    await second.turns()
    assert second.did(PromoteServer, RestartServer)[0] == PromoteServer(name="server-1", replaces="server-0")
    assert second.did(RestartServer) and second.history.fleet.standbys == {"server-0"}
    assert states(second) == {"server-0": ServerState.PARKED, "server-1": ServerState.READY}

    third = StandbyTrial(tmp_path, second.run)
    assert third.history.fleet.standbys == {"server-0"}
    third.run.kill_server("server-1")
    third.hands.fails[PromoteServer] = 1
    await third.turns()
    assert states(third) == {"server-0": ServerState.READY, "server-1": ServerState.PARKED}
    again = PromoteServer(name="server-0", replaces="server-1")
    assert third.did(AdmitServer, PromoteServer) == [again, again], "one that failed is tried again"
    assert third.history.state is RunState.RUNNING
    began = third.events("incident.began")
    assert [(e["subject"], e["cause"]) for e in began] == [("server-0", "server_crash"), ("server-1", "server_crash")]
    ended = third.events("incident.ended")
    assert ended[0]["reason"].startswith("server-1, which stood by, has its place") and ended[0]["is_mended"]
    assert third.events("server.promoted")[0]["incident"] == began[0]["incident"]


async def test_a_dead_standby_is_replaced_quietly(tmp_path):
    trial = await StandbyTrial(tmp_path, RunModel(servers=1)).begun()
    await trial.turns()
    trial.run.kill_server("server-1")
    await trial.turns()
    assert states(trial)["server-1"] is ServerState.PARKED
    assert trial.events("incident.began") == []
    rungs = {e["rung"] for e in trial.events("repair.begun") if e["subject"] == "server-1"}
    assert "standby" in rungs and "server" not in rungs


def test_the_record_changes_places_and_a_standby_is_not_of_the_size_of_the_fleet():
    record = FleetRecord()
    first = ["server-0", "server-1"]
    joins = {"event": "server.joining", "subject": "server-2", "is_standby": True}
    for event in (joins, joins):  # ordered again
        record.take(event)
    assert (record.members(first), record.staying(first)) == ([*first, "server-2"], first)
    assert record.next_name(first) == "server-3"
    record.take({"event": "server.promoted", "subject": "server-2", "replaces": "server-0", "recovered_after_s": 0.2})
    assert record.staying(first) == ["server-1", "server-2"]
    assert record.replaced == {"server-0": "server-2, which stood by, has its place, 0.20 s after its end"}
    record.take({"event": "server.promoted", "subject": "server-0", "replaces": "server-1"})
    assert (record.standbys, set(record.replaced)) == ({"server-1"}, {"server-1"})
    record.take({"event": "server.left", "subject": "server-1"})
    assert record.standbys == set()
