"""Ray ends a process for the machine's memory and tells its caller only that the actor was restarted."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest
import ray

from actors.cluster.ray_oom_kills import MONITOR_INTERVAL
from launcher.base.messages import Cause
from launcher.policy.exit_cause import RanOut, find_trainer_cause
from tests.programs.ray_kill_run import Trainer, end_of, pid_of
from tests.programs.supervised_run import SupervisedRun
from tests.support.machine import scaled

NEVER_ENOUGH = {"RAY_memory_usage_threshold": "0.001"}
EACH_FOUR_SECONDS = {MONITOR_INTERVAL: "4000"}
"""An actor lives long enough to be waited for, on a slow machine too."""

pytestmark = pytest.mark.timeout(400)


def test_an_end_by_ray_for_memory_is_told():
    """On a cluster as a user brings it: with a dashboard, and with Ray's memory monitor."""
    folder = tempfile.mkdtemp(prefix="ray-")  # short: sockets lie in it
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.programs.ray_kill_run", folder],
            env=os.environ | NEVER_ENOUGH | EACH_FOUR_SECONDS,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=scaled(200),
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    end = json.loads(done.stdout.splitlines()[-1])
    assert end["ended"]
    found = find_trainer_cause(end["said"].splitlines(), None)
    assert (found.cause, found.ran_out) == (Cause.TRAINER_OOM, RanOut.TRAINER_HOST)


def test_where_no_dashboard_answers_the_reason_is_not_known(cluster, monkeypatch, caplog):
    monkeypatch.delenv(MONITOR_INTERVAL)
    actor = Trainer.remote()

    async def scenario():
        pid = pid_of(actor)
        waiting = asyncio.create_task(end_of(pid))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        return await waiting

    try:
        assert asyncio.run(scenario()) == (True, "")
    finally:
        ray.kill(actor)
    assert "ray_kills.not_known" in caplog.text


def test_in_a_cluster_of_its_own_ray_ends_nothing_for_memory(tmp_path):
    """The machine is too full for Ray from the beginning: it ended the trainer, the supervisors or the scorers."""
    with SupervisedRun(tmp_path, steps=3, servers=1, environment=os.environ | NEVER_ENOUGH) as run:
        run.finish()
        run.check_ledger()
        assert run.events("incident.began") == run.events("trainer.died") == []
