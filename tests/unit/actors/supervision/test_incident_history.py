"""What a Coordinator that takes over knows of a run's incidents: of the open ones all, of those that ended nothing."""

from actors.supervision.incident_tracker import IncidentTracker
from launcher.base.messages import Cause, ServerExit
from launcher.policy.incident_policy import Ending, OpenIncident, Trouble
from tests.support.run_memory import history_of

TROUBLE = Trouble(cause=Cause.SERVER_CRASH, subject="server-0", reason="killed")


def crash(history):
    """A server's end is reported before the incident that it begins."""
    end = ServerExit(name="server-0", generation=0, pid=7, exit_code=-9, reason="killed", age_s=0.1)
    history.server_died(end)
    number = history.incident_began(TROUBLE, "it is being restarted", 1.0)["incident"]
    history.event("server.restarting", subject="server-0", reason="")
    return OpenIncident(number=number, cause=TROUBLE.cause, subject=TROUBLE.subject, since=1.0)


def test_the_lines_of_incidents_that_have_ended_are_not_kept(tmp_path):
    history = history_of(tmp_path / "events.jsonl")
    for _ in range(1, 50):
        history.incident_ended(Ending(incident=crash(history), reason="it serves again"))
    history.event("server.ready", subject="server-0", reason="")
    crash(history)
    lines = history_of(tmp_path / "events.jsonl").incidents.lines
    assert [*lines] == [50]
    assert [one["event"] for one in lines[50]] == ["server.died", "incident.began", "server.restarting"]
    left = history_of(tmp_path / "events.jsonl", 2)
    assert [*left.incidents.lines] == [50], "its end is still to be written"
    left.incident_ended(Ending(incident=left.incidents.left_open[50], reason="the attempt ended first"))
    assert left.incidents.lines == {} == left.incidents.left_open


def test_its_evidence_is_gathered_by_how_the_incident_began(tmp_path):
    history, gathered = history_of(tmp_path / "events.jsonl"), []
    crash(history)

    class Artifacts:
        def began(self, number, line):
            gathered.append((number, line["event"]))

    IncidentTracker(history_of(tmp_path / "events.jsonl"), Artifacts()).begin()
    assert gathered == [(1, "incident.began")]
