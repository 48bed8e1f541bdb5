"""The benchmark's arithmetic: ratios and spreads. Nothing is timed here."""

import argparse
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.compose import REPOSITORY
from scripts.lab.benchmark import scale
from scripts.lab.benchmark.__main__ import BENCHMARKS
from scripts.lab.benchmark.measured import Measured, paired_ratio, spread
from tests.support.worlds.benchmarks import BY_FAULT_BENCH, SMALLEST

POSITIVE = st.floats(0.01, 100.0)


def test_each_command_behind_a_figure_is_run_by_a_test():
    """Of the README, and of what holds and what faults cost; the other figures were measured once."""
    measured, found, _ = (REPOSITORY / "docs" / "measurements.md").read_text().partition("\n## Faults, one by one\n")
    assert found
    named = set(re.findall(r"benchmark (\w+)", (REPOSITORY / "README.md").read_text() + measured))
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


@pytest.mark.slow
def test_of_a_small_fleet_each_death_is_noticed_and_all_serve_again():
    (row,) = scale.run(argparse.Namespace(servers=[6], ranks=[], seconds=6.0, kills=2, overrides=[])).raw
    assert row["monitor: deaths not noticed"] == 0
    assert row["monitor: alive and not called healthy"] == 0
    assert row["pool: most less least requests of a server"] == 0
    assert row["Coordinator: events for each server that died"] > 0
