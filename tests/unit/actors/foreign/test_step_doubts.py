"""What a trainer's first steps show about the settings that say how it is read and resumed: told once, and no more."""

from types import SimpleNamespace

import pytest

from actors.foreign.step_doubts import WITHOUT_REWARD, StepDoubts
from launcher.adapters.trainer_adapter import StepSeen


@pytest.fixture
def told():
    return []


@pytest.fixture
def doubts(told):
    return StepDoubts(SimpleNamespace(event=lambda name, **facts: told.append(facts["reason"])), "trainer.pattern")


def lines(*steps):
    return [{"global_step": step} for step in steps]


def look(doubts, *steps, reward=0.5, **more):
    for step in steps:
        doubts.note_step(StepSeen(step=step, reward=reward, **more))


@pytest.mark.parametrize(
    ("restored", "before", "first"),
    [
        (20, range(40), 21),
        (20, range(40), 20),  # checkpoints are named after the number of steps
        (25, range(0, 100, 10), 30),  # it logs each tenth
        (-1, range(40), 1),
        (-1, [], 300),  # nobody has seen where it was
        (20, [7], 300),
    ],
)
def test_it_begins_where_it_was_to(doubts, told, restored, before, first):
    doubts.begin(restored, lines(*before))
    look(doubts, first, first + 1, first + 100)
    assert told == []


@pytest.mark.parametrize(
    ("restored", "first", "said"),
    [
        (20, 41, "it was to resume from step 20 and began at step 41, as from a later checkpoint"),
        (-1, 41, "it was to begin anew and began at step 41, as from a later checkpoint"),
        (20, 1, "it was to resume from step 20 and began at step 1: check trainer.resume"),
    ],
)
def test_one_that_resumes_from_something_else_is_told_of_once(doubts, told, restored, first, said):
    for _ in range(2):
        doubts.begin(restored, lines(*range(40)))
        look(doubts, first, first + 1)
    assert len(told) == 1
    assert told[0].startswith(said)
    assert told[0].endswith("check trainer.resume")


def test_steps_without_any_reward_are_told_of(doubts, told):
    doubts.begin(-1, [])
    look(doubts, *range(1, WITHOUT_REWARD), reward=None)
    assert told == []
    look(doubts, *range(WITHOUT_REWARD, 30), reward=None)
    assert len(told) == 1
    assert "no reward" in told[0]
    assert told[0].endswith("check trainer.pattern")


@pytest.mark.parametrize("more", [{"reward": 0.0}, {"reward": None, "nonfinite": ("reward",)}])
def test_one_reward_is_enough_and_one_that_is_no_number_is_one(doubts, told, more):
    doubts.begin(-1, [])
    look(doubts, 1, **more)
    look(doubts, *range(2, 30), reward=None)
    assert told == []
