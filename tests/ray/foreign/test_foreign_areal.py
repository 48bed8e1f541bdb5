"""AReaL's contract under the launcher: real driver, Ray, process host and tree, and a stand-in for its launcher and
trainer (tests/programs/areal_stand_in.py). The real AReaL: tests/e2e/test_areal.py."""

import contextlib
import json
import os
import shutil
import signal
import sys

import psutil
import pytest

from scripts import check_health
from scripts.lab import adapter_storm
from tests.support.foreign.foreign_run import ROOT, ForeignRun

pytestmark = pytest.mark.timeout(900)

STAND_IN = ROOT / "tests" / "programs" / "areal_stand_in.py"
STEPS = 40
YAML = """
experiment_name: tried
trial_name: areal
allocation_mode: sglang:d1+fsdp:d1
total_train_steps: null
cluster: {{fileroot: "{root}"}}
saver: {{freq_epochs: null, freq_steps: null, freq_secs: null}}
recover: {{mode: auto, freq_epochs: null, freq_steps: 5, freq_secs: null}}
"""


def process(run, word):
    """Of the run's tree, the one that has this word to itself."""
    for pid in run.tree():
        with contextlib.suppress(psutil.NoSuchProcess):
            if word in psutil.Process(pid).cmdline()[2:]:
                return pid
    return None


def project(folder, place="infra/launcher"):
    """A folder with their script, YAML and environment; settings of a run of it."""
    launcher = folder / "areal" / place / "local.py"
    launcher.parent.mkdir(parents=True)
    shutil.copy(STAND_IN, launcher)
    shutil.copy(STAND_IN, folder / "train.py")
    (folder / "their.yaml").write_text(YAML.format(root=folder / "out"))
    return (
        *("trainer.config=their.yaml", f"trainer.python={sys.executable}"),
        *(f"+trainer.env.PYTHONPATH='{folder}'", "reward_health.zero_breaker_steps=null"),
    )


def test_a_lost_trainer_whose_worker_holds_the_log_and_a_lost_server_cost_no_step_and_leave_no_orphan(tmp_path):
    settings = project(tmp_path)
    with ForeignRun(tmp_path, "train.py", *settings, name="areal", conf="areal") as run:
        run.wait_steps(8)
        killed = run.wait_until(run.rank, "its trainer runs")
        os.kill(killed, signal.SIGKILL)
        run.wait_until(lambda: ("trainer_crash", True) in run.incidents(), "it steps again")
        run.wait_steps(18)
        os.kill(run.wait_until(lambda: process(run, "server"), "it has a server"), signal.SIGKILL)
        assert run.wait_end() == 0, run.said()
        assert run.tree() == []
    first, second = run.events("trainer.died")
    assert "the command lives on" in first["reason"]
    assert first["exit_code"] is None
    assert second["exit_code"] == 1
    assert run.incidents() == [("trainer_crash", True)] * 2
    assert run.steps() == list(range(STEPS))
    assert "its trainer has ended; its last step was 39" in run.events("run.finished")[-1]["reason"]
    assert learned(tmp_path) == undisturbed()
    assert check_health.main([str(run.paths.logs)]) == 0


def test_of_an_areal_before_1_0_a_lost_trainer_costs_no_step(tmp_path):
    settings = project(tmp_path, place="launcher")
    with ForeignRun(tmp_path, "train.py", *settings, name="areal", conf="areal") as run:
        run.wait_steps(8)
        os.kill(run.wait_until(run.rank, "its trainer runs"), signal.SIGKILL)
        run.wait_until(lambda: ("trainer_crash", True) in run.incidents(), "it steps again")
        assert run.wait_end() == 0, run.said()
        assert run.tree() == []
    assert run.steps() == list(range(STEPS))
    assert learned(tmp_path, "state.json") == undisturbed()


def test_a_storm_on_it_is_survived(tmp_path, capsys):
    settings = (
        *project(tmp_path),
        f"trainer.cwd={tmp_path}",
        "restart.wait_initial_s=0.1",
        "health.trainer_silence_s=3",
    )
    storm = ("areal", "--seed", "3", "--faults", "kill", "any", "stop", "--steps", "3", "25", "--", *settings)
    assert adapter_storm.main(storm) == 0, capsys.readouterr().out
    assert "exit code 0, 40 steps, each once" in capsys.readouterr().out


def learned(folder, file="__0_0.distcp"):
    """Of the recover folder in its place; a kill while it was written has set another one aside."""
    (state,) = (folder / "out" / "checkpoints").rglob(f"default/recover_checkpoint/{file}")
    return json.loads(state.read_text())["weight"]


def undisturbed():
    weight = 1
    for step in range(1, STEPS + 1):
        weight = (weight * 31 + step) % 1_000_003
    return weight
