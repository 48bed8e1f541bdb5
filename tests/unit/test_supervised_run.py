"""The helper that starts whole runs for tests: nothing of it outlives the test run."""

import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial

import psutil
import pytest

from tests.support.machine import scaled

HOLDER = """
import sys
from pathlib import Path
from tests.programs.supervised_run import SupervisedRun

run = SupervisedRun(Path(sys.argv[1]), steps=1, servers=1)
run._command = [sys.executable, "-c", "import time; time.sleep(3600)"]
with run:
    print(run.process.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_run_ends_with_the_test_run_that_a_signal_ended(tmp_path):
    """Its block was never left: Ray and servers stayed until somebody found them."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    ignores = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)  # as where a shell has started it in the background
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=ignores,  # noqa: PLW1509
    ) as holder:
        run = psutil.Process(int(holder.stdout.readline()))
        try:
            holder.send_signal(signal.SIGTERM)
            holder.wait(scaled(30))
            give_up_at = time.monotonic() + scaled(30)
            with suppress(psutil.NoSuchProcess):  # it may end between two questions
                while run.is_running() and run.status() != psutil.STATUS_ZOMBIE:
                    assert time.monotonic() < give_up_at, "it lives on"
                    time.sleep(0.02)
        finally:
            with suppress(psutil.NoSuchProcess):
                run.kill()
