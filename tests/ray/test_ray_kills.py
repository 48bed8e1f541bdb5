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

from launcher.base.messages import Cause
from launcher.policy.exit_cause import RanOut, find_trainer_cause
from tests.programs.ray_kill_run import Trainer, end_of, pid_of
from tests.support.machine import scaled

NEVER_ENOUGH = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "4000"}
"""Of a cluster of its own, whose actor alone is ended for it: each four seconds, so that it lives long enough to be
waited for, on a slow machine too."""

pytestmark = pytest.mark.timeout(240)


def test_an_end_by_ray_for_memory_is_told():
    folder = tempfile.mkdtemp(prefix="ray-")  # short: sockets lie in it
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.programs.ray_kill_run", folder],
            env=os.environ | NEVER_ENOUGH,
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


def test_any_other_end_is_none(cluster):
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
