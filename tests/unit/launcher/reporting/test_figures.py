"""Curves of the watch page: current steps only, thinned with their range, and asked for bit by bit."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.compose import REPOSITORY
from launcher.reporting.figures import CHARTS, MOST_POINTS, Figures, Window, charts_of

REWARD = "rollout/reward"


def figures_of(lines):
    figures = Figures()
    for step, value in lines:
        figures.add(step, {"global_step": step, "time": 5.0, REWARD: value, "word": "no figure", "flag": True})
    return figures


def current(steps):
    """By the rule of docs/files.md, told line by line."""
    kept = []
    for line, step in enumerate(steps):
        kept = [one for one in kept if steps[one] < step] + [line]
    return kept


@given(st.lists(st.integers(0, 12), max_size=30))
def test_a_later_line_undoes_every_earlier_one_of_its_step_or_beyond(steps):
    figures = figures_of((step, float(step)) for step in steps)
    assert np.flatnonzero(figures.kept([])).tolist() == current(steps)


def test_a_restore_that_no_step_followed_undoes_what_is_beyond_it():
    figures = figures_of((step, 0.5) for step in range(10))
    assert figures.kept([(10, 6)]).sum() == 7
    assert figures.undone(figures.kept([(10, 6)]), REWARD) == [(7.0, 0.5), (8.0, 0.5), (9.0, 0.5)]


def test_a_total_is_of_all_lines_and_of_numbers_alone():
    """One line that had no figure left a storm without the sum of all others."""
    figures = figures_of([(0, 0.5), (1, "NaN"), (0, 2.0), (1, "Infinity"), (2, None)])
    assert (figures.total(REWARD), figures.total("no such key")) == (2.5, 0.0)


def test_few_steps_are_shown_one_by_one():
    curves = figures_of([(0, 0.25), (1, 0.5), (3, 0.75)]).curves(np.ones(3, dtype=bool))
    assert (curves["width"], curves["x"], curves["steps"]) == (1, [0.0, 1.0, 3.0], 3)
    assert curves["series"] == {REWARD: {"mean": [0.25, 0.5, 0.75], "not_finite": 0}}


def test_many_steps_are_thinned_to_their_mean_and_range():
    values = np.random.default_rng(1).random(10_000)
    curves = figures_of(enumerate(values.tolist())).curves(np.ones(10_000, dtype=bool))
    width, series = curves["width"], curves["series"][REWARD]
    assert len(curves["x"]) <= MOST_POINTS
    assert curves["x"][0] == (width - 1) / 2
    by_hand = values.reshape(-1, width)
    assert series["mean"] == pytest.approx(by_hand.mean(axis=1), abs=1e-5)
    assert series["low"] == pytest.approx(by_hand.min(axis=1), abs=1e-5)
    assert series["high"] == pytest.approx(by_hand.max(axis=1), abs=1e-5)


@given(st.integers(0, 5000), st.integers(1, 400), st.integers(0, 300))
def test_what_is_new_continues_what_was_had(had, more, first):
    """The page replaces its last bin and what follows by what it gets."""
    lines = [(step, float(step % 7)) for step in range(first, first + had + more)]
    figures = figures_of(lines[:had])
    window = Window(first=first)
    before = figures.curves(np.ones(had, dtype=bool), window)
    for step, value in lines[had:]:
        figures.add(step, {"global_step": step, REWARD: value})
    kept = np.ones(len(lines), dtype=bool)
    since = int(before["x"][-1]) if had else 0
    new = figures.curves(kept, window, since=since, width=before["width"])
    whole = figures.curves(kept, window, width=before["width"])
    at = next((index for index, x in enumerate(before["x"]) if x >= new["x"][0]), len(before["x"]))
    assert before["x"][:at] + new["x"] == whole["x"]
    assert (
        before["series"].get(REWARD, {"mean": []})["mean"][:at] + new["series"][REWARD]["mean"]
        == (whole["series"][REWARD]["mean"])
    )


def test_a_window_shows_its_steps_alone_and_closer():
    figures = figures_of((step, 1.0) for step in range(10_000))
    curves = figures.curves(np.ones(10_000, dtype=bool), Window(first=400, last=499))
    assert (curves["width"], curves["x"][0], curves["x"][-1]) == (1, 400.0, 499.0)


def test_what_is_not_finite_is_no_point_and_is_counted():
    figures = figures_of([(0, "NaN"), (1, "Infinity"), (2, 0.5), (3, None), (4, "-Infinity")])
    series = figures.curves(np.ones(5, dtype=bool))["series"][REWARD]
    assert series == {"mean": [None, None, 0.5, None, None], "not_finite": 2}
    late = figures.curves(np.ones(5, dtype=bool), since=4, width=1)["series"][REWARD]
    assert late == {"mean": [None], "not_finite": 2}, "of all of them, however often it is asked"
    wide = figures.curves(np.ones(5, dtype=bool), width=2)["series"][REWARD]
    assert wide == {"mean": [None, 0.5, None], "low": [None, 0.5, None], "high": [None, 0.5, None], "not_finite": 2}


def test_a_figure_that_comes_late_has_no_points_before():
    figures = figures_of([(0, 0.5)])
    figures.add(1, {"global_step": 1, "late": 3})
    series = figures.curves(np.ones(2, dtype=bool))["series"]
    assert series["late"]["mean"] == [None, 3.0]
    assert series[REWARD]["mean"] == [0.5, None]


def test_each_figure_has_a_chart():
    keys = [key for _, _, named in CHARTS for key in named] + ["reward_parts/format/avg"]
    charts = charts_of(keys)
    assert [key for chart in charts for key in chart["keys"]] == keys
    assert [chart["title"] for chart in charts if chart["is_further"]] == ["reward_parts/format/avg"]
    assert charts_of([]) == []


def test_each_chart_is_of_figures_that_a_trainer_writes():
    source = "".join(path.read_text() for path in (REPOSITORY / "actors").rglob("*.py"))
    quoted = {*re.findall(r'"[\w/]+"', source)}
    keys = [key for _, _, named in CHARTS for key in named]
    assert [key for key in keys if not {f'"{key}"', f'"{key.partition("/")[2]}"'} & quoted] == []
