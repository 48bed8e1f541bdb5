"""The incident of a lost cluster: all that is done while it is open belongs to it, and its end says what was kept."""

import time

import pytest

from actors.supervision.incident_tracker import _what_was_kept
from launcher.base.messages import Cause
from launcher.cli.attempt_incidents import end_incidents
from launcher.policy.incident_policy import OpenIncident
from launcher.run_files import run_memory
from launcher.run_files.journal import Journal, read_lines
from launcher.run_files.run_memory import IncidentMemory, MemoryFile, RunMemory
from launcher.run_files.run_paths import RunPaths


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


def test_how_long_one_lasted_is_said_of_times_of_this_clock_alone(tmp_path, monkeypatch):
    """The Coordinator was on another machine, which runs for ten days more: an incident of a minute had lasted for
    none, and one of an attempt long ago for as long as this machine runs."""
    paths = RunPaths(fileroot=tmp_path, user="u", experiment_name="e", trial_name="t")
    paths.logs.mkdir(parents=True)
    theirs = time.monotonic() + 864_000.0
    with monkeypatch.context() as patch:
        patch.setattr(run_memory.time, "monotonic", lambda: theirs)
        memory = RunMemory(attempt=2)
        memory.incidents.left_open[1] = OpenIncident(number=1, cause=Cause.SERVER_CRASH, subject="server-0", since=5.0)
        memory.incidents.begin(2, Cause.SERVER_HANG, "server-1", theirs - 60.0)
        MemoryFile(paths.run_memory, "theirs").write(memory)
    end_incidents(Journal(paths.events, 2), paths, "no further attempt can begin")
    first, second = read_lines(paths.events)
    assert first["seconds"] is None
    assert 60.0 <= second["seconds"] < 864_000.0
    assert MemoryFile(paths.run_memory).read(2).incidents.open == {}
