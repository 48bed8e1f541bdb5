"""A trainer of nobody's project on the launcher's real servers, at addresses that never change: they are killed
while they answer and while they load its weights, and it meets no error and no answer of other weights.

Its weights alternate between two models, and it asks greedily, so each of them has one right answer.
"""

import os
import random
import signal
import sys
import time

import pytest

from launcher.run_files.journal import read_lines
from scripts.run_processes import find_servers
from tests.support.foreign.foreign_run import ROOT, ForeignRun

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

MODEL = ROOT / "assets" / "arithmetic" / "model"
STEPS = 12


@pytest.fixture
def run(tmp_path):
    client = ROOT / "tests" / "support" / "foreign" / "server_client.py"
    command = f"{sys.executable} {client} --steps {STEPS} --model {MODEL} --out {tmp_path} --tokens 200"
    settings = [
        *("trainer.rung=servers", f"actor.path={MODEL}", "sglang.n_servers=2", "sglang.device=cpu"),
        *("sglang.dtype=float32", "sglang.max_total_tokens=20000", "seed=1"),
    ]
    with ForeignRun(tmp_path, command, *settings) as started:
        started.deadline_s = 900
        yield started


def answers(run):
    """A line for each step that the trainer has taken."""
    return list(read_lines(run.folder / "answers.jsonl"))


def test_servers_are_killed_and_the_trainer_sees_none_of_it(run):
    draw = random.Random(3)

    def kill_one():
        server = draw.choice(list(find_servers(run.paths)))
        os.kill(server.http.pid, signal.SIGKILL)

    run.wait_until(lambda: len(answers(run)) >= 2, "two steps are done")
    time.sleep(draw.uniform(0, 0.5))
    kill_one()
    run.wait_until(lambda: len(answers(run)) >= 5, "steps go on on the other server")
    updating = run.folder / "weight_update_v7"
    run.wait_until(lambda: updating.exists() or len(answers(run)) >= 7, "the seventh update begins")
    kill_one()
    assert run.wait_end() == 0
    done = answers(run)
    assert [line["step"] for line in done] == list(range(1, STEPS + 1))
    assert [line["errors"] for line in done] == [[]] * STEPS
    for is_other in (False, True):
        found = {tuple(one["tokens"]) for line in done if line["is_other"] is is_other for one in line["answers"]}
        assert len(found) == 1, "one of them was made by other weights, or lost or doubled a token"
    assert len(run.events("server.died")) >= 2
    assert not run.tree()
