"""The times of AReaL's own step lines; what is said where there is no AReaL. With the real one: docs/adapters.md."""

import pytest

from launcher.base.errors import UsageError
from scripts.benchmark import foreign_step
from scripts.benchmark.__main__ import parser


def log(*seconds):
    line = "\x1b[92m(AReaL)\x1b[0m 20261126-09:23:{:06.3f} StatsLogger INFO: Epoch 1/2 Step 1/6 Train step 1/12 done.\n"
    return "".join(line.format(second) for second in seconds)


def test_the_first_steps_are_not_counted():
    assert foreign_step.step_times(log(0, 9, 18, 27, 36, 45, 46.5, 48)) == [1.5, 1.5]


def test_a_run_that_took_no_steps_says_what_it_printed_last():
    with pytest.raises(RuntimeError, match=r"3 steps were taken: .*done"):
        foreign_step.step_times(log(0, 9, 18))


def test_without_areal_nothing_is_started(monkeypatch):
    monkeypatch.delenv("AREAL_RIG", raising=False)
    given = parser(["foreign_step"]).parse_args(["foreign_step"])
    with pytest.raises(UsageError, match="AREAL_RIG is not set"):
        given.run(given)
