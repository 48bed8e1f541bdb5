"""What has been made of prompts in flight: kept with them, saved with the queue, and gone when they are."""

import pytest

from launcher.base.errors import CheckpointError
from launcher.base.rollouts import Completion
from tests.support.worlds.data import queue, restored

MADE = Completion(
    token_ids=(1, 2),
    logprobs=(-0.5, -0.25),
    weight_version=0,
    finish_reason="stop",
    server="a",
)


def test_what_was_made_of_a_prompt_in_flight_is_kept_with_it_until_it_lands():
    prompts = queue(shuffle=False)
    prompts.take_prompts(3)
    assert "kept" not in prompts.state_dict()
    for name in ("p0", "p1", "p9"):
        prompts.keep(name, [MADE])
    assert [prompts.kept(name) for name in ("p0", "p1", "p2", "p9")] == [(MADE,), (MADE,), (), ()]
    again = restored(prompts)
    assert [again.kept(name) for name in ("p0", "p1", "p2", "p9")] == [(MADE,), (MADE,), (), ()]
    prompts.commit(["p0"])
    prompts.requeue(["p1"])
    assert (prompts.kept("p0"), prompts.kept("p1")) == ((), ())
    assert "kept" not in prompts.state_dict()


def test_what_is_abandoned_is_taken_again_first_and_made_anew():
    prompts = queue(shuffle=False)
    prompts.take_prompts(3)
    prompts.keep("p1", [MADE])
    prompts.abandon()
    assert (prompts.in_flight, prompts.kept("p1")) == ((), ())
    assert prompts.take_prompts(4) == ["p0", "p1", "p2", "p3"]


@pytest.mark.parametrize("kept", [["p0"], {"p0": [{"token_ids": 1}]}, {"p0": 1}], ids=str)
def test_kept_answers_that_are_damaged_are_refused_and_change_nothing(kept):
    saved, other = queue(shuffle=False), queue(shuffle=False)
    saved.take_prompts(1)
    before = other.state_dict()
    with pytest.raises(CheckpointError, match="what was kept of prompts in flight is damaged") as error:
        other.load_state_dict(saved.state_dict() | {"kept": kept})
    assert "recover.mode=off" in error.value.hint
    assert other.state_dict() == before
