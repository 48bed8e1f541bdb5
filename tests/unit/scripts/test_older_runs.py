"""The files of a run of before all its servers served: what was recorded then is no name any more, and no trouble."""

import json

import pytest

from launcher.html_report.lanes import lanes_of
from launcher.run_files.event_names import EVENT_NAMES
from launcher.run_files.run_paths import RunPaths
from scripts import diagnose, report
from scripts.health.recorded_run import read_view
from tests.support.report_parts import T0, facts, started

STANDBY = (
    {"event": "server.joining", "subject": "server-1", "is_standby": True},
    {"event": "server.parking", "subject": "server-1"},
    {"event": "server.parked", "subject": "server-1", "pid": 7, "url": "http://127.0.0.1:7"},
    {"event": "server.died", "subject": "server-0", "incident": 1, "reason": "killed", "pid": 5},
    {"event": "incident.began", "subject": "server-0", "incident": 1, "cause": "server_crash", "reason": "killed"},
    {"event": "server.promoting", "subject": "server-1", "replaces": "server-0", "incident": 1},
    {"event": "server.promoted", "subject": "server-1", "replaces": "server-0", "incident": 1, "pid": 7},
    {"event": "repair.begun", "subject": "server-0", "cause": "server_crash", "rung": "standby", "at": 1.0},
    {"event": "incident.ended", "subject": "server-0", "incident": 1, "cause": "server_crash", "is_mended": True},
    {"event": "server.promoting_failed", "subject": "server-1", "replaces": "server-0", "reason": "too late"},
)
FLEET = ({"event": "repair.begun", "subject": "server-0", "cause": "server_crash", "rung": "fleet", "at": 2.0},)
JOINED = (
    {"event": "server.join_asked", "subject": "server-2", "reason": "by order"},
    {"event": "server.joined", "subject": "server-2"},
    {"event": "server.leave_asked", "subject": "server-2", "reason": "by order"},
    {"event": "server.leaving", "subject": "server-2"},
    {"event": "server.left", "subject": "server-2", "moved": 2},
)
GPU = (
    {"event": "gpu.quarantined", "subject": "GPU 0 of node7", "host": "node7", "gpu": "0", "server": "server-0"},
    {"event": "server.moved", "subject": "server-0", "reason": "it is on GPU 2 of node7 now"},
    {"event": "gpu.kept", "subject": "server-0", "reason": "a kernel's defect"},
    {"event": "gpu.none_free", "subject": "server-0", "reason": "no other is free"},
)
OLD = (*STANDBY, *FLEET, *JOINED, *GPU)


@pytest.fixture
def older(tmp_path):
    """The folder of its logs."""
    logs = tmp_path / "logs" / "me" / "exp" / "t0"
    logs.mkdir(parents=True)
    ends = {"event": "run.finished", "subject": "run", "reason": "all steps are done", "global_step": 29}
    events = [{"event": "run.started", "reason": "fresh"}, *OLD, ends]
    steps = [{"global_step": step, "rollout/reward": 0.5 + 0.01 * (step % 3)} for step in range(30)]
    for name, written in (("events", events), ("metrics", steps)):
        lines = [{"time": T0 + n, "monotonic": float(n), "attempt": 1, **one} for n, one in enumerate(written)]
        (logs / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return logs


def test_each_tool_reads_it(older, tmp_path, capsys):
    assert not {"server.parked", "server.promoted"} & EVENT_NAMES.keys()
    assert diagnose.main([str(older)]) == diagnose.UNCLEAR, "it has no figures of its own steps"
    assert "server.promoted server-1" in capsys.readouterr().out
    names = ["--experiment-name", "exp", "--fileroot", str(tmp_path), "--user", "me"]
    assert report.main(names) == 0, capsys.readouterr().err
    paths = RunPaths.of_logs(older)
    assert read_view(paths).status == "FINISHED"
    data = started(range(3))
    for one in OLD:
        data.take_event(one | {"time": T0})
    assert lanes_of(facts(data))
