"""What people get to know of a run that was hurt: numbers, folders, messages, lines on the console."""

import json
import os
import signal

import pytest

from tests.supervised_run import SupervisedRun
from tests.unit.test_alerts import DEADLINE_S, webhook

__all__ = ["webhook"]  # the fixture

pytestmark = pytest.mark.timeout(600)


def test_a_crash_and_a_hang_are_told_once_each_though_the_coordinator_is_killed_meanwhile(tmp_path, webhook):
    url, got, _ = webhook
    with SupervisedRun(tmp_path, steps=200, servers=2, webhook=url) as run:
        run.wait_until(lambda: len(run.server_pids()) == 2, "both serve")
        first = run.server_pids()
        run.kill(first["server-1"])
        run.wait_until(lambda: run.events("incident.began", "server-1"), "it has begun")
        run.kill(run.coordinator_pids()[-1])
        run.wait_until(lambda: run.events("incident.ended", "server-1"), "it has ended")
        os.kill(first["server-0"], signal.SIGSTOP)
        run.wait_until(lambda: run.events("incident.ended", "server-0"), "the hang has ended")
        said = run.stop()
        assert run.incidents() == {
            1: ("server_crash", "server-1", True),
            2: ("server_hang", "server-0", True),
        }
        messages = [got.get(timeout=DEADLINE_S) for _ in range(4)]
        assert sorted((m["incident"], m["state"]) for m in messages) == [
            (number, state) for number in (1, 2) for state in ("began", "ended")
        ]
        assert got.empty()
        for died in run.events("server.died"):
            assert died["incident"] == 1
        for number, subject in ((1, "server-1"), (2, "server-0")):
            told = json.loads((run.paths.incident(number) / "incident.json").read_text())
            assert (told["subject"], told["is_mended"]) == (subject, True)
            assert any(action.startswith(f"{subject}: server.restarted") for action in told["actions"])
            assert (run.paths.incident(number) / f"{subject}.log.tail").exists()
        assert (run.paths.incident(2) / "stacks" / "server-0.txt").stat().st_size
        lines = [line for line in said.splitlines() if "incident " in line]
        assert [("incident 1: server-1 crashed" in lines[0]), ("incident 1 is over after" in lines[1])] == [True, True]
        assert "A worker died or was killed" not in said, "Ray's own words are in ray.log"
        assert "all mended: " in said
        assert not run.events("server.loading_failed"), "weights that are ordered are those of the moment of sending"
