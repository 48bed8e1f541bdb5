"""The real GRPOTrainer of TRL, on the CPU, under the launcher: killed at random steps, stopped, damaged, finished.

Runs where TRL is installed: in the interpreter that TRL_PYTHON names, else in the one of the tests."""

import os
import random
import signal
import subprocess
import sys

import pytest

from scripts import check_health
from tests.support.foreign.foreign_run import ROOT, ForeignRun

PYTHON = os.environ.get("TRL_PYTHON", sys.executable)
SCRIPT = ROOT / "tests" / "programs" / "trl_trainer.py"
OPTIONS = (
    "--output_dir out --max_steps 90 --save_steps 10 --logging_steps 1 --per_device_train_batch_size 4 "
    "--num_generations 4 --max_completion_length 8 --use_cpu --bf16 false --report_to none --learning_rate 1e-5 "
    "--gradient_checkpointing false"
)
SEED, STEPS = 14, 90


def has_trl():
    found = subprocess.run([PYTHON, "-c", "import trl"], capture_output=True, check=False, timeout=300)
    return found.returncode == 0


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_grpo_trainer_is_killed_stopped_and_damaged_and_takes_every_step(tmp_path, kills):
    if not has_trl():
        pytest.skip("TRL is not installed (TRL_PYTHON names an interpreter that has it)")
    number = kills(3)
    at = sorted(random.Random(SEED).sample(range(2, 45), number))
    folder = tmp_path / "their project"
    folder.mkdir()
    command = f"python {SCRIPT} {OPTIONS}"
    settings = (f"trainer.python={PYTHON}", "trainer.checkpoints=out/checkpoint-*", "reward_health.warmup_steps=10")
    with ForeignRun(folder, command, *settings, name="trl", conf="trl") as run:
        for step in at:
            run.wait_steps(step)
            pid = run.kill_trainer(script=SCRIPT.name)
            run.wait_until(lambda pid=pid: run.trainer_pid(SCRIPT.name) not in (None, pid), "it is restarted")
            run.wait_until(lambda: len(run.incidents()) == len(run.events("incident.began")), "it steps again")
        run.wait_steps(48)
        run.kill_trainer(signal.SIGSTOP, script=SCRIPT.name)
        run.wait_until(lambda: ("trainer_hang", True) in run.incidents(), "the hang is over")
        run.wait_steps(62)
        (folder / "damage").touch()
        assert run.wait_end() == 0, run.said()
        assert run.tree() == []
    causes = [cause for cause, is_mended in run.incidents() if is_mended]
    assert sorted(causes) == sorted(["trainer_crash"] * number + ["trainer_hang", "reward_collapse"])
    assert run.steps() == list(range(1, STEPS + 1))
    (collapse,) = [event for event in run.events("incident.began") if event["cause"] == "reward_collapse"]
    (back,) = [e["global_step"] for e in run.events("trainer.restored") if e["incident"] == collapse["incident"]]
    assert back < collapse["onset_step"]
    assert back % 10 == 0
    assert (folder / "out" / f"checkpoint-{STEPS}" / "trainer_state.json").exists()
    assert check_health.main([str(run.paths.logs)]) == 0
