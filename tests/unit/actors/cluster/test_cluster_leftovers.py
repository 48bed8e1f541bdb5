"""What a cluster leaves behind is ended by the mark that its processes bear, and nobody else is."""

import os
import secrets
import subprocess
import sys
import threading

import pytest

from actors.cluster.ray_cluster import MARK, end_leftovers
from actors.processes.process_tree import bearing

NAMED = "import ctypes, time; ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0); print(1, flush=True); time.sleep(1000)"


def start(mark, name=b"worker"):
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", NAMED.format(name=name)],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"1\n"
    return process


def end(processes):
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def test_only_processes_of_the_cluster_are_ended():
    mark = secrets.token_hex(8)
    mine, others = start(mark), start(secrets.token_hex(8))
    try:
        assert end_leftovers(f"{MARK}={mark}", patience_s=0.0, hosts_s=0.0) == [mine.pid]
        assert mine.wait(30) == -9
        assert others.poll() is None
        assert end_leftovers(f"{MARK}={mark}", patience_s=0.0, hosts_s=0.0) == []
    finally:
        end((mine, others))


def test_a_host_has_longer_to_end_its_server_than_a_worker_to_end_itself():
    mark = secrets.token_hex(8)
    started = [start(mark), start(mark, b"process-host")]
    try:
        assert end_leftovers(f"{MARK}={mark}", patience_s=0.0, hosts_s=0.0) == [one.pid for one in started]
        started += [start(mark), start(mark, b"process-host")]
        *_, worker, host = started
        threading.Timer(0.5, host.kill).start()
        assert end_leftovers(f"{MARK}={mark}", patience_s=0.0, hosts_s=60.0) == [worker.pid]
        assert bearing(f"{MARK}={mark}") == []
    finally:
        end(started)


@pytest.mark.parametrize(("title", "is_ended"), [(b"ray::RuntimeEnvAgent", True), (b"wandb-core", False)])
def test_an_agent_whose_title_covers_its_mark_is_ended_with_the_drivers_group(title, is_ended):
    """Agents of a killed raylet and GCS outlived their cluster by a minute: no mark is seen in their environment."""
    driver = """
import subprocess, sys
from actors.cluster.ray_cluster import end_leftovers
member = subprocess.Popen([sys.executable, "-S", "-c", sys.argv[1]], stdout=subprocess.PIPE, env={})
member.stdout.readline()
print(end_leftovers("GRPO_CLUSTER=none", patience_s=0.0, hosts_s=0.0) == [member.pid], member.poll() is not None)
member.kill()
"""
    words = [sys.executable, "-c", driver, NAMED.format(name=title)]
    ran = subprocess.run(words, capture_output=True, text=True, start_new_session=True, check=True)
    assert ran.stdout.split() == [str(is_ended)] * 2
