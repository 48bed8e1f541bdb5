"""A live AReaL run is noticed before a tool touches its folders: by its processes, or by a young log elsewhere."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid

import pytest

from actors.processes.process_tree import descendants, identify, send
from launcher.checkpoints.areal_folders import SUPERVISED
from launcher.checkpoints.areal_log import read_servers
from launcher.checkpoints.trial_folders import find_trial
from scripts import setup_recovery
from scripts.checkpoints.areal_processes import areal_processes, is_of_this_machine
from tests.support.checkpoint_makers import EXPERIMENT, USER, make_areal

TOOL = setup_recovery
TRIAL = f"t{uuid.uuid4().hex}"
"""Of this test run alone: its tools look at all processes of the machine, and those of others at its own."""
NAMES = ("--experiment-name", EXPERIMENT, "--trial-name", TRIAL, "--user", USER)


@pytest.fixture
def only_of_this_test():
    """All processes of the machine, as a person's tool sees them."""


@pytest.fixture
def trial(root):
    make_areal(root, [20], recover_step=40, rewards=[0.5] * 60, trial=TRIAL)
    return find_trial(root, USER, EXPERIMENT, TRIAL)


@contextlib.contextmanager
def started(*command, shell=False):
    """Until it has written its first line."""
    with subprocess.Popen(*command if shell else [command], shell=shell, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline()
            yield process
        finally:
            for one in [*descendants(process.pid), identify(process.pid)]:
                if one is not None:
                    send(one, signal.SIGTERM)


def below(pid):
    return [one.pid for one in descendants(pid)]


WAITS = "import time; print('there', flush=True); time.sleep(600)"


def test_the_pipeline_of_its_launcher(trial, tool, refused):
    """As AReaL's local launcher starts it: python, through tee, below a shell."""
    line = f'{sys.executable} -u -c "{WAITS}" train.py 2>&1 | tee -a {trial.logs}/trainer.log'
    with started(line, shell=True) as shell:
        pids = {one.pid for one in areal_processes(trial)}
        assert pids == {shell.pid, *below(shell.pid)}
        assert len(pids) == 3
        said = refused("--before-step", "40", code=2)
        assert f"{EXPERIMENT}/{TRIAL} is running: " in said
        assert f"end it first: kill {shell.pid}" in said
    refused("--before-step", "30", code=2)  # its log is young, and no server's address says whose machine it was
    os.utime(trial.logs / "trainer.log", (1.79e9, 1.79e9))
    assert tool("--before-step", "30")[0] == 0


def test_a_trainer_started_by_hand_is_known_by_its_command(trial, refused):
    words = (f"experiment_name={EXPERIMENT}", f"trial_name={TRIAL}")
    with started(sys.executable, "-c", WAITS, *words) as trainer:
        assert [one.pid for one in areal_processes(trial)] == [trainer.pid]
        assert "is running" in refused("--undo", code=2)
    with started(sys.executable, "-c", WAITS, words[0], "trial_name=another"):
        assert areal_processes(trial) == []


def test_a_launcher_that_prepares_its_own_resume_is_not_in_its_way(trial, tool, monkeypatch):
    words = ("-m", "launcher", "conf=areal", f"experiment_name={EXPERIMENT}", f"trial_name={TRIAL}")
    with started(sys.executable, "-c", WAITS, *words) as driver:
        assert [one.pid for one in areal_processes(trial)] == [driver.pid], "a person's tool is refused"
        monkeypatch.setenv(SUPERVISED, "1")
        assert areal_processes(trial) == []
        assert tool("--before-step", "30")[0] == 0
        with started(sys.executable, "-c", WAITS, *words[3:]) as trainer:
            assert [one.pid for one in areal_processes(trial)] == [trainer.pid], "another trainer is"


def test_who_reads_its_log_is_not_the_run(trial, tool):
    with started("tail", "-f", str(trial.logs / "trainer.log")):
        assert areal_processes(trial) == []
        assert tool("--before-step", "30")[0] == 0


def test_a_young_log_may_be_another_machines(trial, tool, refused):
    log = trial.logs / "trainer.log"
    os.utime(log)
    said = refused("--before-step", "30", code=2)
    assert "may be running on another machine" in said
    assert "trainer.log was written" in said
    with log.open("a") as file:
        file.write("SGLang server launched at: http://192.0.2.7:23239\n")
    assert is_of_this_machine(trial) is False
    assert refused("--before-step", "30", code=2)
    with log.open("a") as file:
        file.write("LLM inference server launched at: AREAL_LLM_SERVER_ADDRS=127.0.0.1:23239,127.0.0.1:23240\n")
    assert read_servers(trial.logs) == ["http://127.0.0.1:23239", "http://127.0.0.1:23240"]
    assert is_of_this_machine(trial), "of this machine, where none runs"
    assert tool("--before-step", "30")[0] == 0, "of this machine, where none runs"
    assert time.time() - log.stat().st_mtime < 100
