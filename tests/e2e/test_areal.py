"""The real AReaL 1.0.4 and its SGLang servers, on the CPU, under the launcher, by AReaL's legacy launcher and as a
single controller with two ranks: trainer and server killed; rewards at 0.

AREAL_RIG: see scripts/lab/areal_rig.py; without it the tests are skipped.
"""

import contextlib
import dataclasses
import json
import os
import signal
import time

import psutil
import pytest

from launcher.run_log.run_log import written_steps
from scripts import check_health
from scripts.lab.areal_rig import BROKEN, areal_rig, make_folder, settings_of, variables_of
from scripts.lab.foreign_cost import cost_of
from tests.support.foreign.foreign_run import ForeignRun

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(areal_rig() is None, reason="AREAL_RIG names no folder with AReaL 1.0.4"),
]
SERVER = "areal.experimental.inference_service.sglang.launch_server"
STEPS = 30
STARTED = {"legacy": (), "single": ("scheduler.type=local", "actor.backend=fsdp:d2p1t1")}


class ArealRun(ForeignRun):
    deadline_s = 1200

    def server(self) -> int | None:
        return self.process(lambda words: words[1:3] == ["-m", SERVER])

    def rank(self) -> int | None:
        """The last of a single controller's; the legacy launcher's only one."""
        role = ["--role", "actor", "--worker-index", "1"]
        found = self.process(
            lambda words: words[1:2] == ["-m"] and any(words[i : i + 4] == role for i in range(len(words)))
        )
        return found or super().rank()

    def process(self, is_wanted) -> int | None:
        for pid in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                if is_wanted(psutil.Process(pid).cmdline()):
                    return pid
        return None

    def kill(self, find) -> float:
        os.kill(self.wait_until(find, find.__name__), signal.SIGKILL)
        return time.time()

    def finish(self):
        assert self.wait_end() == 0, self.said()[-3000:]
        assert self.tree() == []
        assert self.steps() == list(range(STEPS))
        assert check_health.main([str(self.paths.logs)]) == 0


@pytest.fixture(params=STARTED)
def run(tmp_path, monkeypatch, request):
    make_folder(areal_rig(), tmp_path)
    for name, value in variables_of(tmp_path, STEPS).items():
        monkeypatch.setenv(name, value)
    named = ["--", "experiment_name=tried", "trial_name=areal", *STARTED[request.param]]
    settings = settings_of(areal_rig(), tmp_path, named)
    with ArealRun(tmp_path, "train.py", *settings, name="areal", conf="areal") as started:
        yield started


def test_areal_is_killed_and_loses_its_server_and_takes_every_step(run):
    costs = {}
    run.wait_steps(7)
    killed_at = run.kill(run.rank)
    run.wait_until(lambda: ("trainer_crash", True) in run.incidents(), "its trainer steps again")
    run.wait_steps(13)
    costs["trainer SIGKILLed"] = dataclasses.asdict(cost_of(written_steps(run.paths), killed_at))
    killed_at = run.kill(run.server)
    run.wait_until(lambda: len(run.incidents()) == 2, "it has a server again")
    run.wait_steps(20)
    costs["server SIGKILLed"] = dataclasses.asdict(cost_of(written_steps(run.paths), killed_at))
    (run.folder / "costs.json").write_text(json.dumps(costs, indent=2))
    print(json.dumps(costs, indent=2))
    run.finish()
    assert [cause for cause, is_mended in run.incidents() if is_mended] == ["trainer_crash"] * 2


def test_areal_loses_its_rewards_and_goes_on_from_before(run):
    run.wait_steps(14)
    (run.folder / BROKEN).touch()
    run.wait_until(lambda: run.events("incident.began"), "its rewards are known to be 0")
    (run.folder / BROKEN).unlink()
    run.finish()
    assert run.incidents() == [("reward_collapse", True)]
    (collapse,) = run.events("incident.began")
    (back,) = [e["global_step"] for e in run.events("trainer.restored") if e["incident"] == collapse["incident"]]
    assert back < collapse["onset_step"]
