"""A detached run: who started it may go, what an operator asked holds, and it ends when it is told to."""

import subprocess
import sys
import time

import pytest

from launcher.reporting.current_status import read_now
from tests.programs.supervised_run import DEADLINE_S, SupervisedRun
from tests.support.clusters.raylets import Raylets
from tests.support.machine import scaled

pytestmark = pytest.mark.timeout(900)


def until(holds, run) -> None:
    """As `SupervisedRun.wait_until`, of a run whose command is gone."""
    give_up_at = time.monotonic() + scaled(DEADLINE_S)
    while not holds():
        assert time.monotonic() < give_up_at, run.tail()
        time.sleep(0.05)


def control(run, *words: str) -> subprocess.Popen:
    names = ["--experiment-name", run.paths.experiment_name, "--fileroot", str(run.paths.fileroot), "--timeout", "300"]
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.run_control", *words, *names],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def said(asked: subprocess.Popen, code: int = 0) -> str:
    out, _ = asked.communicate(timeout=scaled(DEADLINE_S))
    assert asked.returncode == code, out
    return out


def has_stopped(run) -> bool:
    status = read_now(run.paths).status
    is_idle = status is not None and status.phase == "idle" and status.next_step == run.steps_done()
    return bool(is_idle and run.events("trainer.paused"))


def test_the_command_may_go_an_operators_pause_holds_and_stop_ends_it(tmp_path):
    runs = tmp_path / "run"
    runs.mkdir()
    with Raylets(tmp_path, head_cpus=3) as cluster:
        settings = [f"cluster.address={cluster.address}", "cluster.detached=true"]
        with SupervisedRun(runs, steps=900, servers=1, settings=settings, environment=cluster.environment) as run:
            run.wait_steps(2)
            assert "run_control" in run.said()
            run.kill(run.process.pid)
            run.process.wait()
            steps = run.steps_done()
            until(lambda: run.steps_done() > steps, run)

            assert "is PAUSED" in said(control(run, "pause", "--reason", "lunch"))
            until(lambda: has_stopped(run), run)  # a step that was under way is finished
            steps, coordinators = run.steps_done(), run.coordinator_pids()
            run.kill(coordinators[-1])
            until(lambda: len(run.coordinator_pids()) > len(coordinators), run)
            beat = read_now(run.paths).beat
            until(lambda: read_now(run.paths).beat > beat + 3, run)
            assert run.steps_done() == steps, "it stays paused, whoever died"
            assert "lunch" in said(control(run, "status"))

            assert "is RUNNING" in said(control(run, "resume"))
            until(lambda: run.steps_done() > steps, run)
            attached = control(run, "attach")
            assert attached.stdout.readline(), "it shows the run"
            again = subprocess.run(run._command, env=cluster.environment, capture_output=True, text=True, check=False)
            assert "is already running" in again.stderr
            assert "is ABORTED" in said(control(run, "stop"))
            assert "ABORTED" in said(attached, 130)
            run.steps = run.steps_done()
            run.check_ledger()
            run.wait_gone(30.0)
