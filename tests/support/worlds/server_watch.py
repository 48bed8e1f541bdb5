"""A server whose process tree and HTTP answer as the test says."""

import contextlib
import os
import subprocess
import sys
from functools import partial

import aiohttp

from launcher.config.supervision import HealthConfig
from tests.support.machine import scaled

deadline_s = partial(scaled, 30.0)


QUICK = HealthConfig(
    look_interval_s=0.02, probe_interval_s=0.05, stopped_s=0.2, silence_s=0.4, silence_factor=1.0, proof_s=1.0
)


@contextlib.contextmanager
def tree(folder, *words):
    folder.mkdir(exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.programs.fake_server_tree", *words],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)},
    ) as process:
        try:
            assert process.stdout.readline() == "up\n"
            yield process
        finally:
            process.kill()


async def fault(url, **fault):
    async with aiohttp.ClientSession() as session, session.post(f"{url}/stand_in/fault", json=fault) as answer:
        answer.raise_for_status()
