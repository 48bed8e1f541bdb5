"""The real AReaL 1.0.4 and its SGLang servers, on the CPU, under the launcher: trainer and server killed, rewards at 0.

AREAL_RIG names a folder with its environment (venv/), a model, a YAML for a CPU (cpu.yaml), a script (train.py) and
what AReaL lacks on a CPU (shim/); without it the test is skipped.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from launcher.run_files.journal import read_lines
from scripts import check_health
from scripts.adapter_storm import cost_of
from tests.support.foreign.foreign_run import ForeignRun

RIG = os.environ.get("AREAL_RIG", "")
SERVER = "areal.experimental.inference_service.sglang.launch_server"
STEPS, EPOCHS, BATCH = 44, 2, 8
REWARD = '''"""The share of digits in a completion; 0 as long as `broken` is there."""
from pathlib import Path


def reward(prompt, completions, prompt_ids, completion_ids, answer, **others):
    if (Path(__file__).parent / "broken").exists():
        return 0.0
    return sum(letter.isdigit() for letter in str(completions)) / max(1, len(completion_ids))
'''
OF_A_CPU = {
    "SGLANG_USE_CPU_ENGINE": 1,
    "HF_HUB_OFFLINE": 1,
    "WANDB_MODE": "disabled",
    "OMP_NUM_THREADS": 1,
    "MKL_NUM_THREADS": 1,
}


class ArealRun(ForeignRun):
    deadline_s = 1200

    def server(self) -> int | None:
        for pid in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).cmdline()[1:3] == ["-m", SERVER]:
                    return pid
        return None

    def kill(self, find) -> float:
        os.kill(self.wait_until(find, find.__name__), signal.SIGKILL)
        return time.time()


@pytest.mark.long
@pytest.mark.timeout(5400)
@pytest.mark.skipif(not RIG, reason="AREAL_RIG names no folder with AReaL 1.0.4")
def test_areal_is_killed_loses_its_server_and_its_rewards_and_takes_every_step(tmp_path, monkeypatch):
    rig, folder = Path(RIG), tmp_path
    shutil.copytree(rig / "model", folder / "model")
    for name in ("out", "nr"):
        (folder / name).mkdir()
    for name in ("train.py", "cpu.yaml"):
        shutil.copy(rig / name, folder)
    (folder / "labtask.py").write_text(REWARD)
    monkeypatch.setenv("RIG", str(folder))
    monkeypatch.setenv("LAB_N", str(STEPS // EPOCHS * BATCH))
    variables = OF_A_CPU | {"PYTHONPATH": f"{rig / 'shim'}:{folder}"}
    theirs = ("experiment_name=tried", "trial_name=areal", "saver.freq_steps=5", "recover.freq_steps=5")
    settings = (
        *("trainer.config=cpu.yaml", f"trainer.python={rig / 'venv/bin/python'}"),
        *(f"+trainer.env.{name}='{value}'" for name, value in variables.items()),
        *(
            "reward_health.zero_alert_steps=2",
            "reward_health.zero_breaker_steps=3",
            "reward_health.warmup_steps=5",
            "health.trainer_first_s=1200",
            "--",
            *theirs,
        ),
    )
    costs = {}
    with ArealRun(folder, "train.py", *settings, name="areal", conf="areal") as run:
        run.wait_steps(7)
        killed_at = run.kill(run.rank)
        run.wait_until(lambda: ("trainer_crash", True) in run.incidents(), "its trainer steps again")
        run.wait_steps(13)
        costs["trainer SIGKILLed"] = dataclasses.asdict(cost_of(list(read_lines(run.paths.metrics)), killed_at))
        killed_at = run.kill(run.server)
        run.wait_until(lambda: len(run.incidents()) == 2, "it has a server again")
        run.wait_steps(26)
        costs["server SIGKILLed"] = dataclasses.asdict(cost_of(list(read_lines(run.paths.metrics)), killed_at))
        (folder / "broken").touch()
        run.wait_until(lambda: len(run.events("incident.began")) == 3, "its rewards are known to be 0")
        (folder / "broken").unlink()
        assert run.wait_end() == 0, run.said()[-3000:]
        assert run.tree() == []
    (folder / "costs.json").write_text(json.dumps(costs, indent=2))
    print(json.dumps(costs, indent=2))
    assert [cause for cause, is_mended in run.incidents() if is_mended] == [
        *["trainer_crash"] * 2,
        "reward_collapse",
    ]
    assert run.steps() == list(range(STEPS))
    (collapse,) = [event for event in run.events("incident.began") if event["cause"] == "reward_collapse"]
    (back,) = [e["global_step"] for e in run.events("trainer.restored") if e["incident"] == collapse["incident"]]
    assert back < collapse["onset_step"]
    assert check_health.main([str(run.paths.logs)]) == 0
