"""The example of a script with TRL's GRPOTrainer and the callback, under the launcher: paused, killed, finished.

With TRL, where the interpreter in TRL_PYTHON or that of the tests has it; else with transformers' own Trainer, which
calls the same callback (tests/programs/stand_ins/trl).
"""

import json
import os
import subprocess
import sys

import pytest

from launcher.run_files.journal import read_lines
from scripts import run_control
from tests.support.foreign.foreign_run import ROOT, ForeignRun

EXAMPLE = ROOT / "assets" / "examples" / "trl_grpo.py"
STAND_IN = ROOT / "tests" / "programs" / "stand_ins"
STEPS = 60
OPTIONS = (
    f"--output_dir out --max_steps {STEPS} --save_steps 5 --logging_steps 100 --per_device_train_batch_size 4 "
    "--use_cpu --bf16 false --report_to none --learning_rate 1e-5"
)
OF_TRL = " --num_generations 4 --max_completion_length 8 --gradient_checkpointing false"


def python_with_trl():
    python = os.environ.get("TRL_PYTHON", sys.executable)
    found = subprocess.run([python, "-c", "import trl"], capture_output=True, check=False, timeout=300)
    return None if found.returncode else python


@pytest.mark.long  # the callback: tests/unit/launcher/adapters/test_trainer_callback.py; a command: tests/ray/foreign
@pytest.mark.timeout(1200)
def test_the_example_is_paused_killed_and_takes_every_step(tmp_path):
    python = python_with_trl()
    model = ROOT / "assets" / "arithmetic" / "model"
    (tmp_path / "train.py").write_text(EXAMPLE.read_text().replace("Qwen/Qwen2.5-0.5B-Instruct", str(model)))
    path = str(ROOT) if python else f"{ROOT}:{STAND_IN}"
    settings = [f"trainer.python={python or sys.executable}", f"+trainer.env.PYTHONPATH='{path}'"]
    settings += ["trainer.metrics=out/steps.jsonl", "trainer.checkpoints=out/checkpoint-*"]
    command = f"python train.py {OPTIONS}" + (OF_TRL if python else "")
    with ForeignRun(tmp_path, command, *settings, name="callback", conf="trl") as run:
        run.wait_steps(3)
        assert run_control.main(["pause", str(run.paths.logs), "--timeout", "300"]) == 0
        held = run.steps()
        assert held[-1] < STEPS
        assert run_control.main(["resume", str(run.paths.logs), "--timeout", "300"]) == 0
        run.wait_steps(held[-1] + 8)
        killed = run.kill_trainer(script="train.py")
        run.wait_until(lambda: run.trainer_pid("train.py") not in (None, killed), "it is restarted")
        assert run.wait_end() == 0, run.said()
        assert run.tree() == []
    assert run.incidents() == [("trainer_crash", True)]
    assert run.steps() == list(range(1, STEPS + 1))
    (restored,) = [event["global_step"] for event in run.events("trainer.restored") if event["global_step"] > 0]
    assert restored % 5 == 0
    assert restored >= held[-1]
    said = [json.loads(line) for line in (tmp_path / "out" / "steps.jsonl").read_text().splitlines() if line]
    waits = [place for place, one in enumerate(said) if one.get("grpo_paused")]
    (place,) = waits
    assert said[place + 1] == said[place] | {"grpo_paused": False, "time": said[place + 1]["time"]}
    assert {line["rollout/reward"] for line in read_lines(run.paths.metrics)} - {None}
