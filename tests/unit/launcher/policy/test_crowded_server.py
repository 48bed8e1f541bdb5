"""A server that waits for a CPU is told from one that is slow by itself."""

import dataclasses
import os
import subprocess
import sys

import pytest

from actors.processes.process_tree import identify
from actors.serving import server_processes
from launcher.config.supervision import HealthConfig
from launcher.policy.observation_history import ProcessLook, ServerEvidence, ServerLook, observe

SETTINGS = HealthConfig()


class Looks:
    """Four a second, at a server whose scheduler has had a CPU, and has waited for one, for so many seconds."""

    def __init__(self):
        self.process = ProcessLook(state="R", cpu_s=0.0)
        self.evidence = ServerEvidence(look=ServerLook(at=0.0, processes={"scheduler": self.process}))

    def at(self, n, *, ran_s, waited_s):
        for _ in range(n):
            self.process = dataclasses.replace(
                self.process, ran_s=self.process.ran_s + ran_s, waited_s=self.process.waited_s + waited_s
            )
            look = ServerLook(at=self.evidence.look.at + 0.25, processes={"scheduler": self.process})
            self.evidence = observe(self.evidence, look, SETTINGS)
        return self.evidence.is_crowded


@pytest.mark.parametrize(
    ("ran_s", "waited_s", "is_crowded"),
    [
        pytest.param(0.05, 0.15, True, id="others have the CPU"),
        pytest.param(0.15, 0.05, False, id="a CPU that is shared a little"),
        pytest.param(0.06, 0.0, False, id="stopped and continued, or a slow GPU"),
        pytest.param(0.0, 0.0, False, id="idle, or a kernel that doesn't say"),
    ],
)
def test_it_is_crowded_where_it_waits_longer_than_it_runs(ran_s, waited_s, is_crowded):
    assert Looks().at(40, ran_s=ran_s, waited_s=waited_s) is is_crowded


def test_it_is_so_for_as_long_as_the_crowd_is_there():
    looks = Looks()
    assert not looks.at(400, ran_s=0.2, waited_s=0.01)
    assert looks.at(40, ran_s=0.05, waited_s=0.2)
    assert looks.at(400, ran_s=0.0, waited_s=0.0)  # nobody asked it for anything
    assert not looks.at(40, ran_s=0.2, waited_s=0.01)


def test_a_real_process_that_shares_its_cpu_with_two_others_waits_longer_than_it_runs():
    cpu = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, [{cpu}]); print(flush=True)\nwhile True: pass"
    crowd = [subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) for _ in range(3)]
    try:
        for one in crowd:
            one.stdout.readline()
        process = identify(crowd[0].pid)
        first = last = server_processes._look(process, server_processes.SCHEDULER)
        while last.ran_s + last.waited_s < first.ran_s + first.waited_s + 0.3:
            last = server_processes._look(process, server_processes.SCHEDULER)
        assert last.waited_s - first.waited_s > last.ran_s - first.ran_s > 0
    finally:
        for one in crowd:
            one.kill()
            one.communicate()
