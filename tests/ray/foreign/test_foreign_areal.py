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


def process(run, *words):
    """Of the run's tree, the one that has each of these words to itself."""
    for pid in run.tree():
        with contextlib.suppress(psutil.NoSuchProcess):
            if {*words} <= {*psutil.Process(pid).cmdline()[2:]}:
                return pid
    return None


def project(folder, more=""):
    """A folder with their script, YAML and environment; settings of a run of it."""
    for file in ("areal/infra/launcher/local.py", "areal/infra/rpc/rpc_server.py", "areal/engine/launch_server.py"):
        (folder / file).parent.mkdir(parents=True)
        shutil.copy(STAND_IN, folder / file)
    shutil.copy(STAND_IN, folder / "train.py")
    (folder / "their.yaml").write_text(YAML.format(root=folder / "out") + more)
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


def test_of_a_single_controller_a_lost_rank_server_or_the_whole_costs_no_step_and_leaves_no_orphan(tmp_path):
    """It stays for ever after the loss of a server, and its ranks stay after its own."""
    settings = project(tmp_path, "scheduler: {type: local}\nactor: {backend: 'fsdp:d2'}\n")
    lost = {8: ("actor", "1"), 18: ("areal.engine.launch_server",), 28: ("their.yaml", "--config")}
    with ForeignRun(tmp_path, "train.py", *settings, name="areal", conf="areal") as run:
        for number, (step, words) in enumerate(lost.items(), 1):
            run.wait_steps(step)
            before = {*run.tree()}
            os.kill(run.wait_until(lambda words=words: process(run, *words), words[0]), signal.SIGKILL)
            run.wait_until(lambda number=number: len(run.incidents()) == number, f"it steps again without {words}")
            assert not before & {*run.tree()}
        assert run.wait_end() == 0, run.said()
        assert run.tree() == []
    rank, server, _ = (died["reason"] for died in run.events("trainer.died"))
    assert "--role actor --worker-index 1" in rank
    assert "areal.engine.launch_server" in server
    assert run.incidents() == [("trainer_crash", True)] * 3
    assert run.steps() == list(range(STEPS))
    assert learned(tmp_path) == undisturbed()
    assert [*(tmp_path / "out" / "checkpoints").rglob("closed")], "it was ended before it had saved all"


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


def learned(folder):
    """Of the recover folder in its place; a kill while it was written has set another one aside."""
    (state,) = (folder / "out" / "checkpoints").rglob("default/recover_checkpoint/__0_0.distcp")
    return json.loads(state.read_text())["weight"]


def undisturbed():
    weight = 1
    for step in range(1, STEPS + 1):
        weight = (weight * 31 + step) % 1_000_003
    return weight
