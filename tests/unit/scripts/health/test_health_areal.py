"""check_health on a run of AReaL's own launcher: live, hung, dead or finished, as its processes and logs show it."""

import contextlib
import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from scripts import check_health
from tests.programs.stand_in_server import running
from tests.support.checkpoint_makers import EXPERIMENT, TRIAL, USER, make_areal, write_areal_log
from tests.support.trial_names import NAMES

WAITS = "import time; print('there', flush=True); time.sleep(600)"


@pytest.fixture
def logs(root):
    make_areal(root, [20, 40], recover_step=40)
    return root / "logs" / USER / EXPERIMENT / TRIAL


def told(logs, rewards, *, ended_s_ago=0.0, total=160, step_s=1.0, servers=()):
    """A log whose last step was so long ago, by the stamps in it and by its own time."""
    write_areal_log(logs / "trainer.log", rewards)
    text = (logs / "trainer.log").read_text().replace("/160 done", f"/{total} done")
    last = len(rewards) - 1
    for step in range(len(rewards)):
        before = time.strftime("%Y%m%d-%H:%M:%S", time.gmtime(1.79e9 + step))
        now = time.strftime("%Y%m%d-%H:%M:%S", time.localtime(time.time() - ended_s_ago - (last - step) * step_s))
        text = text.replace(before, now, 1)
    named = "".join(f"SGLang server launched at: {url}\n" for url in servers)
    (logs / "llm_server.log").write_text(named or "SGLang server launched at: http://127.0.0.1:9\n")
    (logs / "trainer.log").write_text(text)
    for log in logs.glob("*.log"):
        os.utime(log, (time.time() - ended_s_ago,) * 2)


@pytest.fixture
def trainer(logs):
    """As AReaL's local launcher starts it."""
    logs.mkdir(parents=True, exist_ok=True)
    line = f'{sys.executable} -u -c "{WAITS}" torchrun train.py 2>&1 | tee -a {logs}/trainer.log'
    with subprocess.Popen(line, shell=True, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout.readline() == "there\n"
        python, tee = sorted(psutil.Process(shell.pid).children(), key=lambda one: "tee" in one.cmdline()[0])
        yield python
        for one in (python, tee):
            with contextlib.suppress(psutil.NoSuchProcess):  # tee ends with python, and the shell with both
                one.kill()


@pytest.fixture
def checked(root, capsys):
    def run(*flags):
        code = check_health.main(["--fileroot", str(root), *NAMES, "--json", *flags])
        found = json.loads(capsys.readouterr().out)
        return code, {(one["check"], one["subject"]): (one["verdict"], one["said"]) for one in found["findings"]}

    return run


@pytest.mark.slow
def test_a_live_run_is_healthy_where_all_of_it_is(logs, trainer, checked, root):
    with running("--model-path", str(root / "no-model"), "--weight-version", "21") as url:
        told(logs, [0.5] * 30, ended_s_ago=1.0, servers=[url])
        code, found = checked("--timeout", "30")
        assert found["run", "state"] == ("ok", "RUNNING, 30 of 160 steps are done")
        assert found["run", "reward"] == ("ok", "mean of 0.500 over the last 10 steps")
        assert found["run", "processes"][0] == "ok"
        assert f"trainer {trainer.pid}" in found["run", "processes"][1]
        assert found["servers", url][0] == "ok"
        assert found["servers", url][1].startswith("a token in ")
        assert found["checkpoints", "recovery"] == ("ok", "AReaL would resume after step 40")
        bad = [one for one in found.items() if one[1][0] in ("bad", "unknown") and one[0][0] not in ("memory", "disk")]
        assert bad == []
        told(logs, [0.5] * 20 + [0.0] * 10, ended_s_ago=1.0, servers=[url])
        code, found = checked("--timeout", "30")
        assert code == 1
        assert found["run", "reward"] == ("bad", "every reward was 0 for 10 steps in a row")


def test_a_hung_run_is_seen(logs, trainer, checked):
    """AReaL's own launcher says nothing of any of these."""
    told(logs, [0.5] * 30, ended_s_ago=300.0)
    trainer.suspend()
    code, found = checked()
    assert code == 1
    assert found["run", "steps"][0] == "bad"
    assert "one usually takes 1.0 s" in found["run", "steps"][1]
    assert found["run", "processes"][0] == "bad"
    assert f"trainer {trainer.pid}" in found["run", "processes"][1]
    assert found["servers", "http://127.0.0.1:9"][0] == "bad", "its server answers nothing"


def test_an_orphan_without_its_trainer(logs, trainer, checked):
    """What holds the log's pipe open lives on, and AReaL's launcher waits for it."""
    told(logs, [0.5] * 30, ended_s_ago=1.0)
    trainer.cmdline()
    with subprocess.Popen(["tee", "-a", str(logs / "trainer.log")], stdin=subprocess.PIPE) as orphan:
        trainer.kill()
        psutil.wait_procs([trainer], timeout=10)
        code, found = checked()
        orphan.stdin.close()
    assert code == 1
    assert found["run", "processes"][1].startswith("no trainer among them: ")


@pytest.mark.slow
def test_a_dead_run_and_a_finished_one(logs, checked, root):
    told(logs, [0.5] * 84, ended_s_ago=3600.0)
    code, found = checked()
    assert code == 1
    assert found["run", "state"][0] == "bad"
    assert found["run", "state"][1].startswith("ENDED: no process of it is left, after 84 of 160 steps; its log is ")
    assert found["servers", "servers"] == ("absent", "the run has ended")
    told(logs, [0.5] * 84, ended_s_ago=3600.0, total=84)
    assert checked()[1]["run", "state"] == ("ok", "FINISHED: all 84 steps are done, by its log")
    told(logs, [0.5] * 84, ended_s_ago=20.0, servers=["http://192.0.2.7:8000"])
    state = checked("--timeout", "3")[1]["run", "state"]
    assert state[0] == "unknown"
    assert "it may run on another machine" in state[1]
    torn = root / "checkpoints" / USER / EXPERIMENT / TRIAL / "recover_info" / "step_info.json"
    torn.write_text(torn.read_text().replace("40", "70"))
    told(logs, [0.5] * 84, ended_s_ago=3600.0, total=84)
    code, found = checked()
    assert code == 1
    assert found["checkpoints", "recovery"][0] == "bad"
    assert "mixes two steps" in found["checkpoints", "recovery"][1]
