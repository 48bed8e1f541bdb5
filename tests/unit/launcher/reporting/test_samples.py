"""Completions of a step, from the two files that keep them."""

import json

import pytest

from launcher.reporting import samples
from launcher.reporting.samples import samples_of
from launcher.run_files.journal import TAIL_WINDOW


def lines(steps, *, attempt=1, each=3):
    return "".join(
        json.dumps({"global_step": step, "attempt": attempt, "completion": f"{step}.{index}", "reward": 1.0}) + "\n"
        for step in steps
        for index in range(each)
    )


def texts(paths, step):
    return [one["completion"] for one in samples_of(paths, step)]


def test_the_newest_step_one_that_is_named_and_the_nearest_before(paths):
    paths.samples.write_text(lines([0, 1, 5]))
    assert texts(paths, None) == ["5.0", "5.1", "5.2"]
    assert texts(paths, 1) == ["1.0", "1.1", "1.2"]
    assert texts(paths, 4) == ["1.0", "1.1", "1.2"]
    assert samples_of(paths, -1) == []


@pytest.mark.parametrize("window", [64, 200, 1000])
def test_they_are_found_from_the_end_whatever_is_looked_through_at_once(paths, monkeypatch, window):
    monkeypatch.setattr(samples, "TAIL_WINDOW", window)
    assert window < TAIL_WINDOW
    paths.samples.with_name("samples.1.jsonl").write_text(lines(range(40)))
    paths.samples.write_text(lines(range(40, 80)))
    for step in (0, 17, 39, 40, 79):
        assert texts(paths, step) == [f"{step}.{index}" for index in range(3)]
    assert texts(paths, None) == ["79.0", "79.1", "79.2"]


def test_a_step_that_was_done_again_is_shown_as_it_was_done_last(paths):
    paths.samples.write_text(lines(range(10)) + lines([6, 7], attempt=2))
    assert samples_of(paths, 7)[0]["attempt"] == 2
    assert texts(paths, 9) == ["7.0", "7.1", "7.2"], "steps 8 and 9 were undone"
    assert texts(paths, 5) == ["5.0", "5.1", "5.2"]


def test_nothing_was_kept(paths):
    assert samples_of(paths, None) == []
    paths.samples.write_text("torn\n[1]\n{}\n")
    assert samples_of(paths, None) == []


def test_a_text_turns_no_reading_direction(paths):
    paths.samples.write_text(json.dumps({"global_step": 0, "completion": "a\u202eb\nc", "prompt": None}) + "\n")
    assert samples_of(paths, 0)[0]["completion"] == "a\\u202eb\nc"
