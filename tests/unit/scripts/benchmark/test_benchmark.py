"""The benchmark's arithmetic: ratios, the parts of a step, the milestones of a start. Nothing is timed here."""

import argparse
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.compose import REPOSITORY
from launcher.run_files.journal import append_line
from scripts.benchmark import scale, start
from scripts.benchmark.__main__ import BENCHMARKS
from scripts.benchmark.measured import Measured, paired_ratio, spread
from scripts.benchmark.step import measured, read_step_times, step_times
from tests.e2e.test_benchmarks import BY_FAULT_BENCH, SMALLEST

POSITIVE = st.floats(0.01, 100.0)


def test_each_command_behind_a_figure_is_run_by_a_test():
    pages = ("README.md", "docs/status.md", "docs/fault_bench.md")
    named = {name for page in pages for name in re.findall(r"benchmark (\w+)", (REPOSITORY / page).read_text())}
    assert {"supervision", "failover", "restores"} <= named & set(BENCHMARKS) <= {*SMALLEST, BY_FAULT_BENCH}


def test_a_ratio_is_taken_round_by_round():
    """A machine that was ten times slower in one round changes nothing; the ratio of the medians would be 1.5."""
    ratio = paired_ratio([9.0, 90.0, 0.9], [10.0, 100.0, 1.0])
    assert ratio.value == pytest.approx(0.9)
    assert (ratio.low, ratio.high) == (pytest.approx(0.9), pytest.approx(0.9))


@pytest.mark.slow
@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=12))
def test_the_interval_holds_the_ratio_and_lies_within_the_rounds(pairs):
    ours, theirs = zip(*pairs, strict=True)
    ratio = paired_ratio(ours, theirs)
    ratios = [a / b for a, b in pairs]
    assert min(ratios) <= ratio.low <= ratio.value <= ratio.high <= max(ratios)
    assert paired_ratio(ours, theirs) == ratio, "the draws are seeded"


def test_an_interval_narrows_with_more_rounds():
    def width(times):
        ratio = paired_ratio([0.8, 0.9, 1.0, 1.1, 1.2] * times, [1.0] * 5 * times)
        return ratio.high - ratio.low

    assert width(40) < width(1)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [([1.0], [1.0, 2.0], "1 and 2 figures"), ([], [], "0 and 0"), ([0.0], [1.0], "positive")],
)
def test_figures_that_make_no_ratio_are_refused(ours, theirs, said):
    with pytest.raises(ValueError, match=said):
        paired_ratio(ours, theirs)


def test_a_spread_says_the_median_the_ends_and_how_often():
    assert spread([3.0, 0.01234, 2000.0]) == "3 (0.01234 to 2,000, 3 times)"
    assert spread([0.5]) == "0.5"


def test_what_was_measured_is_printed_and_what_has_no_point_is_not():
    ratio = paired_ratio([2.0], [1.0])
    found = Measured(points={"step_s": [1.0], "never_s": []}, ratios={"on ÷ off": ratio}, notes=["complete"])
    assert [*found.lines()] == ["step_s   1", "on ÷ off: 2.000 (2.000 to 2.000)", "complete"]


def line(step, time, *, attempt=1, rollout=0.5, train=0.3, publish=0.05, checkpoint=0.0):
    return {
        "global_step": step,
        "attempt": attempt,
        "time": time,
        "timeperf/rollout_s": rollout,
        "timeperf/train_s": train,
        "timeperf/publish_s": publish,
        "timeperf/checkpoint_s": checkpoint,
    }


def test_what_is_neither_generation_nor_training_is_the_rest_of_the_time_between_two_lines():
    (time,) = step_times([line(0, 100.0), line(1, 101.0, checkpoint=0.1)], [])
    assert time.neither == pytest.approx(0.2)
    assert time.rest == pytest.approx(0.05)
    assert measured([time]).points["neither_%"] == [pytest.approx(20.0)]


def test_steps_with_an_evaluation_or_a_restart_within_are_left_out():
    lines = [
        line(0, 0.0),
        line(1, 1.0),
        line(2, 9.0),
        line(3, 10.0),
        line(2, 40.0, attempt=2),
        line(3, 41.0, attempt=2),
    ]
    assert [time.global_step for time in step_times(lines, [8.5])] == [1, 3, 3]


def test_a_run_is_read_from_its_logs(paths):
    for written in (line(0, 10.0), line(1, 11.0), line(2, 13.0)):
        append_line(paths.metrics, written)
    append_line(paths.events, {"event": "eval.done", "time": 12.0})
    append_line(paths.events, {"event": "checkpoint.committed", "time": 10.5})
    assert [time.global_step for time in read_step_times(paths)] == [1]


def test_milestones_are_the_first_of_their_events_and_the_first_line_of_metrics(paths):
    append_line(paths.metrics, line(0, 1030.0))
    for at, event in enumerate(("run.started", "server.starting", "trainer.started", "eval.done", "eval.done")):
        append_line(paths.events, {"event": event, "time": 1000.0 + at})
    assert start.milestones(paths) == {
        "ray_is_up_s": 1000.0,
        "trainer_ready_s": 1002.0,
        "evaluated_before_s": 1003.0,
        "first_step_s": 1030.0,
    }


@pytest.mark.slow
def test_of_a_small_fleet_each_death_is_noticed_and_all_serve_again():
    (row,) = scale.run(argparse.Namespace(servers=[6], ranks=[], seconds=6.0, kills=2, overrides=[])).raw
    assert row["monitor: deaths not noticed"] == 0
    assert row["monitor: alive and not called healthy"] == 0
    assert row["pool: most less least requests of a server"] == 0
    assert row["Coordinator: events for each server that died"] > 0
