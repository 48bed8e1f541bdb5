"""What a Coordinator that takes over knows of a run's incidents: of the open ones all, of those that ended nothing."""

from actors.supervision.incident_history import IncidentHistory
from actors.supervision.incident_tracker import IncidentTracker


def event(name, number, subject="server-0", **facts):
    return {"event": name, "incident": number, "subject": subject, "cause": "server_crash", "at": 1.0, **facts}


def crash(number):
    """A server's end is reported before the incident that it begins."""
    return [event("server.died", number), event("incident.began", number), event("server.restarting", number)]


def taken(events):
    history = IncidentHistory()
    for one in events:
        history.take(one)
    return history


def test_the_lines_of_incidents_that_have_ended_are_not_kept():
    ended = [one for number in range(1, 50) for one in (*crash(number), event("incident.ended", number))]
    history = taken([*ended, event("server.ready", 49), *crash(50)])
    assert [*history.lines] == [50]
    assert [one["event"] for one in history.lines[50]] == ["server.died", "incident.began", "server.restarting"]
    history.next_attempt()
    assert [*history.lines] == [50], "its end is still to be written"
    history.take(event("incident.ended", 50))
    assert history.lines == {}


def test_its_evidence_is_gathered_by_how_the_incident_began():
    incidents, gathered = taken(crash(3)), []

    class Artifacts:
        def began(self, number, line):
            gathered.append((number, line["event"]))

    class History:
        pass

    history = History()
    history.incidents = incidents
    IncidentTracker(history, Artifacts()).begin()
    assert gathered == [(3, "incident.began")]
