"""The plan says how many steps and epochs a run has, and how many checkpoints it keeps for good."""

import pytest

from launcher.resources.memory_estimate import MIB
from launcher.resources.planned_length import length_lines
from tests.support.composed import composed


def lines(prompts, *settings, **known):
    return list(length_lines(composed("conf=arithmetic_cpu", *settings), prompts, **known))


@pytest.mark.parametrize(
    ("prompts", "settings", "said"),
    [
        (
            40,
            (),
            "3 steps: 1 epoch of 40 prompts by 16, the last batch of an epoch has 8; "
            "for more: a larger total_train_epochs",
        ),
        (32, (), "2 steps: 1 epoch of 32 prompts by 16; for more: a larger total_train_epochs"),
        (
            40,
            ("total_train_epochs=40",),
            "120 steps: 40 epochs of 40 prompts by 16, the last batch of an epoch has 8; "
            "for more: larger total_train_epochs and _steps",
        ),
        (3664, (), "120 steps (total_train_steps) of the 229 in 1 epoch of 3,664 prompts by 16"),
        (
            32,
            ("actor.dynamic_sampling=2",),
            "at most 2 steps: 1 epoch of 32 prompts by 16; for more: a larger total_train_epochs",
        ),
    ],
)
def test_the_number_of_steps_and_what_it_comes_from(prompts, settings, said):
    assert lines(prompts, *settings)[0] == said


def test_prompts_that_were_not_measured_are_an_upper_limit():
    assert lines(32, is_upper=True)[0].startswith("at most 2 steps: 1 epoch")


def test_the_checkpoints_that_are_kept_for_good_and_their_size():
    epochs = ("total_train_epochs=40", "total_train_steps=100")
    assert lines(40, *epochs, checkpoint_bytes=10 * MIB)[1] == (
        "33 checkpoints kept for good (saver.freq_epochs=1), together about 330.0 MiB"
    )
    several = (*epochs, "saver.freq_steps=50", "saver.freq_epochs=10", "saver.freq_secs=60")
    assert lines(40, *several)[1] == (
        "5 checkpoints kept for good (saver.freq_steps=50, saver.freq_epochs=10); more by saver.freq_secs"
    )
    assert lines(40, "saver.freq_epochs=null")[1:] == []
    assert lines(3664)[1] == "no checkpoint is kept for good: the run ends before one is due (saver.freq_epochs=1)"
