"""When a save or an evaluation is due."""

import pytest

from launcher.config.schedule import Schedule
from launcher.config.schema import FreqConfig


def due_steps(schedule, *, first=1, last, steps_per_epoch=10, seconds_per_step=1.0):
    """The steps, counted from 1, after which it was due."""
    return [
        step
        for step in range(first, last + 1)
        if schedule.step_done(ended_epoch=step % steps_per_epoch == 0, now=step * seconds_per_step)
    ]


@pytest.mark.parametrize(
    ("freq", "expected"),
    [
        ({}, []),
        ({"freq_steps": 7}, [7, 14, 21, 28]),
        ({"freq_steps": 1}, list(range(1, 31))),
        ({"freq_epochs": 1}, [10, 20, 30]),
        ({"freq_epochs": 2}, [20]),
        ({"freq_secs": 12}, [12, 24]),
        ({"freq_steps": 7, "freq_epochs": 1}, [7, 10, 14, 20, 21, 28, 30]),
        # 12 s after the save at step 10, not 12 s after the one that time alone would have asked for
        ({"freq_secs": 12, "freq_epochs": 1}, [10, 20, 30]),
        ({"freq_secs": 4, "freq_epochs": 1}, [4, 8, 10, 14, 18, 20, 24, 28, 30]),
    ],
)
def test_due_when_any_interval_ends(freq, expected):
    assert due_steps(Schedule(FreqConfig(**freq), now=0.0), last=30) == expected


def test_the_first_one_shows_early_what_can_not_be_saved():
    schedule = Schedule(FreqConfig(freq_steps=7), now=0.0, first_steps=2)
    assert due_steps(schedule, last=30) == [2, 7, 14, 21, 28]
    schedule.restored(now=0.0, steps_done=2, epochs_done=0)
    assert due_steps(schedule, first=3, last=16) == [7, 14], "it has it by then"


def test_steps_that_take_longer_than_the_interval_are_each_due():
    assert due_steps(Schedule(FreqConfig(freq_secs=5), now=0.0), last=3, seconds_per_step=60.0) == [1, 2, 3]


def test_a_resumed_run_saves_after_the_same_steps():
    freq = FreqConfig(freq_steps=7, freq_epochs=2)
    whole = due_steps(Schedule(freq, now=0.0), last=40)
    resumed = Schedule(freq, now=0.0)
    resumed.restored(now=11.0, steps_done=11, epochs_done=1)
    assert due_steps(Schedule(freq, now=0.0), last=11) + due_steps(resumed, first=12, last=40) == whole
