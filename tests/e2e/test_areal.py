"""The real AReaL 1.0.4 and its SGLang servers, on the CPU, under the launcher: trainer and server killed, rewards at 0.

AREAL_RIG: see scripts/faults/areal_rig.py; without it the test is skipped.
"""

import contextlib
import dataclasses
import json
import os
import signal
import time

import psutil
import pytest

from launcher.run_files.journal import read_lines
from scripts import check_health
from scripts.adapter_storm import cost_of
from scripts.faults.areal_rig import BROKEN, areal_rig, make_folder, settings_of, variables_of
from tests.support.foreign.foreign_run import ForeignRun

SERVER = "areal.experimental.inference_service.sglang.launch_server"
STEPS = 44


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
@pytest.mark.skipif(areal_rig() is None, reason="AREAL_RIG names no folder with AReaL 1.0.4")
def test_areal_is_killed_loses_its_server_and_its_rewards_and_takes_every_step(tmp_path, monkeypatch):
    folder = tmp_path
    make_folder(areal_rig(), folder)
    for name, value in variables_of(folder, STEPS).items():
        monkeypatch.setenv(name, value)
    settings = settings_of(areal_rig(), folder, ["--", "experiment_name=tried", "trial_name=areal"])
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
        (folder / BROKEN).touch()
        run.wait_until(lambda: len(run.events("incident.began")) == 3, "its rewards are known to be 0")
        (folder / BROKEN).unlink()
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
