"""Which setting a sweep recommends, what its CSV holds, and what its exit code is."""

import csv
import io

import pytest

from launcher.base.messages import Cause
from launcher.sweep.sweep_command import exit_code
from launcher.sweep.sweep_report import CLOSE, as_csv, rank, recommendation
from launcher.sweep.sweep_trials import SweepTrial
from launcher.sweep.trial_results import TrialResult, TrialStatus


def trial(value: object, *, status=TrialStatus.FINISHED, step_s=1.0, **more) -> TrialResult:
    name = f"t-{value}"
    return TrialResult(
        trial=SweepTrial(name=name, settings={"a.b": str(value)}, overrides=()), status=status, step_s=step_s, **more
    )


def oom(value: object, **more) -> TrialResult:
    return trial(value, status=TrialStatus.ERRORED, step_s=None, cause=Cause.SERVER_OOM, **more)


def recommended(*results: TrialResult) -> list[str]:
    return [one.trial.settings["a.b"] for one in rank(results)[:1]]


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([trial(1, step_s=2.0), trial(2, step_s=1.0), trial(3, step_s=3.0)], ["2"]),
        ([trial(1, step_s=2.0), trial(2, step_s=1.0, incidents={"server_oom": 1})], ["1"]),
        ([trial(1, step_s=2.0), trial(2, step_s=1.0, incidents={"server_crash": 1})], ["2"]),
        ([trial(1, step_s=2.0), oom(2)], ["1"]),
        ([trial(1, step_s=2.0), trial(2, status=TrialStatus.CUT_OFF, step_s=1.0)], ["1"]),
        ([trial(1, step_s=2.0), trial(2, step_s=None)], ["1"]),
        ([oom(1), oom(2)], []),
    ],
)
def test_the_fastest_that_held(results, expected):
    assert recommended(*results) == expected


@pytest.mark.parametrize(
    ("step_s", "is_close"),
    [(1.0 + CLOSE, True), (1.0 + 1.01 * CLOSE, False)],
)
def test_a_lead_that_one_run_each_can_not_show_is_called_so(step_s, is_close):
    said = recommendation(rank([trial(2, step_s=step_s), trial(1, step_s=1.0), oom(4)]))
    assert said.startswith("recommended: a.b=1 (the fastest step of the 2 that")
    assert ("a.b=2 is so close" in said) == is_close


def test_where_all_ran_out_of_memory_nothing_is_recommended():
    assert "no setting can be recommended" in recommendation(rank([oom(1)]))


def test_a_trial_that_finished_without_a_step_s_time_is_not_said_not_to_have_finished():
    """One that has a single step of another project's trainer, whose steps are timed from one to the next."""
    said = recommendation(rank([trial(1, step_s=None)]))
    assert "no trial FINISHED, never ran out of memory and has steps with a time" in said
    assert "the 1 that FINISHED, never ran out of memory and has steps with a time" in recommendation(
        rank([trial(1, step_s=None), trial(2)])
    )


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ([TrialStatus.ERRORED, TrialStatus.FINISHED, TrialStatus.REFUSED], 0),
        ([TrialStatus.ERRORED, TrialStatus.REFUSED], 3),
        ([TrialStatus.REFUSED, TrialStatus.ERRORED], 2),
        ([TrialStatus.CUT_OFF], 1),
    ],
)
def test_exit_codes(statuses, code):
    assert exit_code([trial(index, status=status) for index, status in enumerate(statuses)]) == code


def test_the_csv_holds_what_is_known_and_nothing_else():
    (row,) = csv.DictReader(io.StringIO(as_csv([oom(4, reason="no\nroom", incidents={"server_oom": 1})]).decode()))
    assert row | {"trial_name": "t-4", "a.b": "4", "ended": "ERRORED", "cause": "server_oom"} == row
    assert (row["step_s"], row["incidents"], row["reason"]) == ("", "1 server_oom", "no room")
