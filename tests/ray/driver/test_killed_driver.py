"""The driver of a run is killed, and the run finishes by itself, without any flag.

`pytest --all tests/ray/driver/test_killed_driver.py --kills 10` kills it at ten drawn moments.
"""

import random
import signal
import time

import pytest

from tests.programs.supervised_run import SupervisedRun
from tests.support.kept_runs import driver_of

pytestmark = pytest.mark.timeout(900)

STEPS_A_KILL = 13
"""More than the run takes from one kill to the next, also where this test gets its turns late."""
SEED = 5
LEARN_LITTLE = "actor.optimizer.lr=0.00001"
"""The rewards are chance: at the usual rate of these runs the weights have grown after a hundred steps so far that the
rounding of float32 alone reaches gate.distance_float32."""
AFTER_S = 3.0
"""Upper limit of the drawn time after a step at which the driver is killed: a few steps, a checkpoint, a publish."""


def test_a_killed_driver_is_begun_again_and_the_run_finishes_with_its_ledger_whole(tmp_path, kills):
    n_kills = kills(2)
    steps = STEPS_A_KILL * n_kills
    draw = random.Random(SEED)
    signals = [signal.SIGSEGV if number == 2 else signal.SIGKILL for number in range(1, n_kills + 1)]
    with SupervisedRun(tmp_path, steps=steps, servers=1, settings=[LEARN_LITTLE]) as run:
        for number, how in enumerate(signals, start=1):
            run.wait_steps(run.steps_done() + 3)
            time.sleep(draw.uniform(0.0, AFTER_S))
            before = set(run.family())
            driver_of(run.process.pid).send_signal(how)
            run.wait_until(lambda n=number: len(run.events("incident.ended", "driver")) == n, "the next one trains")
            assert {one.pid for one in before & set(run.family())} == {run.process.pid}, (
                "nothing of the old one is left"
            )
            ended = run.events("incident.ended", "driver")[-1]
            assert ended["reason"] == "training continues; no committed step was lost"
        said = run.finish()
        run.wait_gone()
        run.check_ledger()
        assert [line["global_step"] for line in run.ledger()] == list(range(steps)), "no step was taken twice"
        assert set(run.incidents().values()) == {("driver_lost", "driver", True)}
        assert [event["times"] for event in run.events("driver.restarted")] == list(range(1, n_kills + 1))
        killed_by_segv = "incident 2: the run's driver was killed (it was ended by SIGSEGV; 2 times in this command)"
        assert killed_by_segv in said
