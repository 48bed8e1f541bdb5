"""What a session leaves behind is ended by its name, and nobody else is."""

import secrets
import subprocess
import sys

from actors.cluster.ray_cluster import end_stragglers


def start(word):
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)", word])


def test_only_processes_of_the_session_are_ended():
    session = f"session_{secrets.token_hex(8)}"
    mine, others = start(f"--raylet-name=sessions/{session}/raylet"), start("--raylet-name=sessions/session_1/raylet")
    try:
        assert end_stragglers(session, grace_s=0.0) == [mine.pid]
        assert mine.wait(30) == -9
        assert others.poll() is None
        assert end_stragglers(session, grace_s=0.0) == []
    finally:
        for process in (mine, others):
            process.kill()
            process.wait()
