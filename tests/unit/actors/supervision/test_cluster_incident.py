"""The incident of a lost cluster: all that is done while it is open belongs to it, and its end says what was kept."""

import pytest

from actors.supervision.incident_tracker import _what_was_kept
from launcher.base.messages import Cause
from launcher.run_files.run_memory import IncidentMemory


def event(name, number, **facts):
    return {"event": name, "incident": number, "subject": "cluster", "reason": "", **facts}


@pytest.mark.parametrize("name", ["cluster.restarted", "driver.restarted", "attempt.begun_anew"])
@pytest.mark.parametrize(
    ("committed", "restored", "says"),
    [
        (41, 41, "; no committed step was lost"),
        (41, 38, "; 3 steps are repeated"),
        (41, 40, "; 1 step is repeated"),
        (None, -1, ""),
        (41, None, ""),
    ],
)
def test_its_end_says_whether_a_committed_step_was_lost_where_both_are_known(committed, restored, says, name):
    events = [event("incident.began", 3), event(name, 3, global_step=committed)]
    events += [] if restored is None else [event("trainer.loaded", 3, global_step=restored)]
    assert _what_was_kept(events) == says


def test_any_other_incident_says_nothing_of_it():
    assert _what_was_kept([event("incident.began", 1), event("trainer.loaded", 1, global_step=4)]) == ""


def test_what_is_started_while_it_is_open_is_part_of_it():
    incidents = IncidentMemory()
    incidents.begin(3, Cause.CLUSTER_LOST, "cluster", 1.0)
    assert incidents.number_for("trainer.loaded", "trainer") == 3
    assert incidents.number_for("server.ready", "server-0") == 3
    assert incidents.number_to_begin("server-0") == 4
