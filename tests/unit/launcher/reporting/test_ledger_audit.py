"""What the ledger must show, and each way in which it could fail to."""

import random

import pytest

from launcher.reporting.ledger_audit import audit

PROMPTS = 6


def line(step, prompts, versions=None):
    return {"global_step": step, "prompt_ids": prompts, "weight_versions": [step] if versions is None else versions}


def metrics(*steps, distance=1e-8):
    return [{"global_step": step, "grpo_actor/logprob_distance/avg": distance} for step in steps]


def whole_run(epochs=2, batch=2):
    """Each epoch all prompts, in an order of its own."""
    draw, ledger = random.Random(1), []
    for _ in range(epochs):
        order = draw.sample(range(PROMPTS), PROMPTS)
        ledger += [line(len(ledger) + i, order[at : at + batch]) for i, at in enumerate(range(0, PROMPTS, batch))]
    return ledger


def found(ledger, written=None, **more):
    steps = {one["global_step"] for one in ledger}
    return audit(ledger, metrics(*sorted(steps)) if written is None else written, prompts=PROMPTS, **more)


def test_a_whole_run_of_two_epochs_has_no_problems():
    result = found(whole_run())
    assert result.problems == ()
    assert (result.steps, result.taken_back, result.prompts, result.stale_steps) == (6, 0, PROMPTS, 0)
    assert result.largest_distance == 1e-8


def test_an_epoch_that_has_not_ended_is_none():
    assert found(whole_run()[:4]).problems == ()


def test_a_prompt_that_was_left_out_is_used_up_and_counted_apart():
    ledger = [line(0, [0, 1]) | {"filtered_ids": [2, 3]}, line(1, [4, 5]), line(2, [2, 0])]
    result = found(ledger)
    assert (result.problems, result.filtered, result.prompts) == ((), 2, PROMPTS)
    doubled = found([line(0, [0, 1]) | {"filtered_ids": [2]}, line(1, [2, 3])])
    assert doubled.problems == ("step 1: prompt 2 a second time in its epoch",)


def test_steps_taken_back_and_taken_again_stand_once():
    ledger = [line(0, [0, 1]), line(1, [2, 3]), line(2, [4, 5]), line(1, [2, 5]), line(2, [4, 3])]
    result = found(ledger)
    assert result.problems == ()
    assert (result.steps, result.taken_back) == (3, 2)


@pytest.mark.parametrize(
    ("ledger", "says"),
    [
        ([line(0, [0, 1]), line(1, [1, 2])], "step 1: prompt 1 a second time"),
        ([line(0, [0, 1]), line(2, [2, 3])], "never committed: [1]"),
        ([line(0, [0, 1]), line(1, [2, 3], [0])], "step 1: tokens of other weights"),
        ([line(0, [0, 1]), line(1, [2, 3], [1, 2])], "step 1: tokens of other weights"),
        ([line(0, [0, 1]), line(1, [2, 3]) | {"weight_versions": None}], "step 1: tokens of other"),
    ],
)
def test_each_violation_is_named(ledger, says):
    assert any(says in problem for problem in found(ledger).problems)


def test_tokens_within_the_allowed_staleness_are_none():
    ledger = [line(0, [0, 1]), line(1, [2, 3], [0, 1])]
    assert found(ledger, staleness=1).problems == ()
    assert found(ledger).stale_steps == 1


def test_a_step_without_metrics_is_named():
    assert any("without metrics: [1]" in problem for problem in found(whole_run()[:2], metrics(0)).problems)
