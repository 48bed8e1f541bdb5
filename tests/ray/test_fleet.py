"""A server joins a run and another one leaves it, while it goes on."""

import pytest

from scripts import run_control
from tests.supervised_run import SupervisedRun

pytestmark = pytest.mark.timeout(600)


def scale(run, *words):
    of = run.paths
    names = ["--experiment-name", of.experiment_name, "--fileroot", str(of.fileroot), "--user", of.user]
    return run_control.main(["scale", *words, *names, "--timeout", "300"])


def test_a_server_joins_and_the_first_one_leaves_and_no_prompt_notices(tmp_path):
    with SupervisedRun(tmp_path, steps=900, servers=1) as run:
        run.wait_steps(2)
        assert scale(run, "--servers", "2") == 0
        assert run.events("server.joined", "server-1")
        run.kill(run.coordinator_pids()[-1])
        run.wait_until(lambda: run.events("coordinator.adopted"), "the Coordinator is back")
        run.wait_steps(run.steps_done() + 2)
        assert scale(run, "--servers", "1", "--leaves", "server-0") == 0
        assert run.events("server.left", "server-0")
        run.wait_steps(run.steps_done() + 3)
        run.stop()
        run.check_ledger()
        lines = run.ledger()
        assert [line["global_step"] for line in lines] == list(range(run.steps)), "no step was taken twice"
        assert sum(line["rollouts_failed"] + line["rollouts_retried"] for line in lines) == 0
        assert run.events("server.died") == run.events("incident.began") == []
        assert len(run.trainer_pids()) == 1
        assert {e["subject"] for e in run.events("server.starting")} == {"server-0", "server-1"}, "who came was adopted"
        assert len(run.events("server.starting")) == 2
