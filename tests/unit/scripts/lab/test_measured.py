"""The arithmetic of ratios and spreads, and how a measuring command ends. Nothing is timed."""

import argparse
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.compose import REPOSITORY
from scripts.lab.measured import Measured, command, mean_ratio, spread
from tests.support.worlds.benchmarks import SMALLEST

POSITIVE = st.floats(0.01, 100.0)
NEEDS_OTHERS = {"compare_losses"}
"""It compares with other trainers' packages, and has a test of its own arithmetic."""
REMOVED = re.compile(r"\*`[^`]*`\*")
"""A command in italics is one of an earlier commit."""


def test_each_command_behind_a_figure_is_run_by_a_test():
    """Of the README, and of what holds and what faults cost; the other figures were measured once."""
    measured, found, _ = (REPOSITORY / "docs" / "measurements.md").read_text().partition("\n## Faults, one by one\n")
    assert found
    text = REMOVED.sub("", (REPOSITORY / "README.md").read_text() + measured)
    named = {" ".join(words) for words in re.findall(r"scripts\.lab\.(\w+)(?: ([a-z]\w+))?", text)}
    assert {"disturb server_killed", "disturb trainer_killed", "fault_bench ", "overhead "} <= named
    assert {name.strip() for name in named} - NEEDS_OTHERS <= {*SMALLEST}


@pytest.mark.slow
@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=12))
def test_the_interval_holds_the_ratio_and_lies_within_the_pairs(pairs):
    ratio = mean_ratio(pairs)
    ratios = [a / b for a, b in pairs]
    assert min(ratios) * 0.999 <= ratio.low <= ratio.value * 1.001
    assert ratio.value * 0.999 <= ratio.high <= max(ratios) * 1.001
    assert mean_ratio(pairs) == ratio, "the draws are seeded"


def test_an_interval_narrows_with_more_pairs():
    def width(times):
        ratio = mean_ratio([(share, 1.0) for share in (0.8, 0.9, 1.0, 1.1, 1.2)] * times)
        return ratio.high - ratio.low

    assert width(40) < width(1)


def test_a_spread_says_the_median_the_ends_and_how_often():
    assert spread([3.0, 0.01234, 2000.0]) == "3 (0.01234 to 2,000, 3 times)"
    assert spread([0.5]) == "0.5"


def test_a_command_prints_what_was_measured_and_writes_each_point(tmp_path, monkeypatch, capsys):
    ratio = mean_ratio([(2.0, 1.0)])
    found = Measured(points={"step_s": [1.0], "never_s": []}, ratios={"on ÷ off": ratio}, notes=["complete"])
    monkeypatch.setattr("sys.argv", ["measures", "--json", str(tmp_path / "found.json"), "trial_name=mine"])
    asked = []
    assert command(argparse.ArgumentParser(), lambda given: (asked.extend(given.overrides), found)[1]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == ["step_s   1", "on ÷ off: 2.000 (2.000 to 2.000)", "complete"]
    assert said.err.count("load average") == 2
    assert json.loads((tmp_path / "found.json").read_text())["points"] == found.points
    assert asked == ["trial_name=mine"]
