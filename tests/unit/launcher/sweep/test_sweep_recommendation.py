"""Which setting a sweep recommends, why, what it says was not tried; and what its exit code is."""

import csv
import io

import pytest

from launcher.base.messages import Cause
from launcher.sweep.memory_peaks import Peak
from launcher.sweep.recommendation import advise
from launcher.sweep.sweep_command import exit_code
from launcher.sweep.sweep_report import as_csv
from launcher.sweep.sweep_trials import SweepTrial
from launcher.sweep.trial_results import TrialResult, TrialStatus

GIB = 2**30


def trial(value: object, *, status=TrialStatus.FINISHED, step_s=1.0, **more) -> TrialResult:
    name = f"t-{value}"
    return TrialResult(
        trial=SweepTrial(name=name, settings={"a.b": str(value)}, overrides=()), status=status, step_s=step_s, **more
    )


def oom(value: object, **more) -> TrialResult:
    return trial(value, status=TrialStatus.ERRORED, step_s=None, cause=Cause.SERVER_OOM, **more)


def best(*results: TrialResult, host: int | None = None, gpu: int | None = None) -> str | None:
    found = advise(results, host_bytes=host, gpu_bytes=gpu).best
    return found.trial.settings["a.b"] if found is not None else None


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([trial(1, step_s=2.0), trial(2, step_s=1.0), trial(3, step_s=3.0)], "2"),
        ([trial(1, step_s=2.0), trial(2, step_s=1.0, incidents={"server_oom": 1})], "1"),
        ([trial(1, step_s=2.0), trial(2, step_s=1.0, incidents={"server_crash": 1})], "2"),
        ([trial(1, step_s=2.0), oom(2)], "1"),
        ([trial(1, step_s=2.0), trial(2, status=TrialStatus.CUT_OFF, step_s=1.0)], "1"),
        ([oom(1), oom(2)], None),
    ],
)
def test_the_fastest_that_held(results, expected):
    assert best(*results) == expected


def test_a_tenth_of_the_memory_stays_free():
    tight = trial(1, step_s=1.0, peak=Peak(all=95 * GIB))
    roomy = trial(2, step_s=2.0, peak=Peak(all=60 * GIB))
    assert best(tight, roomy, host=100 * GIB) == "2"
    assert best(tight, roomy, host=200 * GIB) == "1"
    assert best(tight, roomy) == "1"
    assert "none leaves a tenth" in advise([tight], host_bytes=100 * GIB, gpu_bytes=None).reason
    assert best(trial(1, peak=Peak(gpu=95 * GIB)), gpu=100 * GIB) is None


def test_the_reason_says_by_how_much_and_what_the_figures_can_not_tell():
    results = [trial(1, step_s=1.0, peak=Peak(all=GIB)), trial(2, step_s=1.02), trial(3, step_s=2.0), oom(4)]
    advice = advise(results, host_bytes=4 * GIB, gpu_bytes=None)
    assert "1.00 s, of 3" in advice.reason
    assert "2% more (a.b=2); so close that one run each can't separate them" in advice.reason
    assert "at most 25% of the host's memory" in advice.reason
    assert "memory ran out in 1: a.b=4" in advice.reason
    assert advice.unexplored == ("a.b below 1: the best is at the end of what was tried",)


def test_what_was_not_explored():
    results = [trial(1, step_s=3.0), trial(2), trial(3, step_s=2.0), trial(5, status=TrialStatus.NOT_RUN, step_s=None)]
    results.append(trial(6, status=TrialStatus.ERRORED, step_s=None, cause=Cause.REWARD_COLLAPSE))
    assert advise(results, host_bytes=None, gpu_bytes=None).unexplored == (
        "no answer from a.b=5 (NOT RUN)",
        "halted for another reason than memory: a.b=6",
    )
    words = [trial("disk"), trial("tensor", step_s=2.0)]
    assert advise(words, host_bytes=None, gpu_bytes=None).unexplored == ()


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
    assert (row["step_s"], row["peak_bytes"], row["incidents"], row["reason"]) == ("", "", "1 server_oom", "no room")
