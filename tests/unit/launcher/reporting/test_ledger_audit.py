"""What the ledger must show, and each way in which it could fail to."""

import random

import pytest

from launcher.base.prompt_order import PromptOrder
from launcher.reporting import ledger_audit
from launcher.reporting.ledger_audit import QueueState, audit

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
    written = metrics(*sorted(steps)) if written is None else written
    return audit(ledger, written, **{"prompts": PROMPTS} | more)


def test_a_whole_run_of_two_epochs_has_no_problems():
    result = found(whole_run())
    assert result.problems == ()
    assert (result.steps, result.taken_back, result.prompts, result.stale_steps) == (6, 0, PROMPTS, 0)
    assert result.largest_distance == 1e-8


def test_a_line_of_metrics_that_names_no_step_is_of_none():
    ledger = whole_run()
    written = metrics(*range(len(ledger)))
    assert found(ledger, [*written[:2], {"attempt": 1}, *written[2:]], restores=[-1]).problems == ()


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


def test_prompts_that_may_be_lost_are_not_said_to_be_still_to_come():
    assert "the epoch was not finished: " in found([line(0, [0, 1]), line(1, [2, 3])]).counts
    lost = found([line(0, [0, 1]), line(2, [2, 3])])
    assert lost.problems
    assert "of them never, 4 of them once" in lost.counts


def test_tokens_within_the_allowed_staleness_are_none():
    ledger = [line(0, [0, 1]), line(1, [2, 3], [0, 1])]
    assert found(ledger, staleness=1).problems == ()
    assert found(ledger).stale_steps == 1


def test_a_step_without_metrics_is_named():
    assert any("without metrics: [1]" in problem for problem in found(whole_run()[:2], metrics(0)).problems)


def test_of_many_missing_steps_the_first_fifty_are_named():
    """A damaged line may claim any step."""
    ledger = [line(step, [n]) for n, step in enumerate((0, 31, 70, 10**12))]
    problem = next(one for one in found(ledger).problems if "never committed" in one)
    named = [*range(1, 31), *range(32, 52)]
    assert problem == f"steps never committed: {named} and {10**12 - 3 - 50:,} more"


def test_of_as_many_missing_steps_as_are_named_none_is_more():
    assert "steps never committed: " + str([*range(1, 51)]) in found([line(0, [0]), line(51, [1])]).problems
    assert str([*range(1, 51)]) + " and 1 more" in found([line(0, [0]), line(52, [1])]).problems[0]


def test_a_step_before_the_first_is_no_gap():
    assert "steps never committed: [1]" in found([line(-3, [0]), line(0, [1]), line(2, [2])]).problems


def test_a_version_that_is_no_number_is_none_of_the_step():
    assert found([line(0, [0], ["0"])]).stale_steps == 1


def test_the_largest_distance_is_that_of_all_steps():
    written = [*metrics(0, distance=1e-8), *metrics(1, distance=1e-3), *metrics(2, distance=1e-8)]
    assert found(whole_run()[:3], written).largest_distance == 1e-3


@pytest.mark.parametrize(("prompts", "is_seen"), [(64, True), (65, True), (63, False)])
def test_of_few_prompts_nobody_can_say_whose_order_it_is(prompts, is_seen):
    order = PromptOrder([f"p{n}" for n in range(prompts)], seed=1, shuffle=True)
    batches = [order.ids_of(0)[at : at + 8] for at in range(0, prompts, 8)]
    ledger = [line(step, [*batch]) for step, batch in enumerate([*batches, *batches])]
    queue = QueueState(step=len(ledger) - 1, epoch=2, cursor=0, returned=(), fingerprint=order.fingerprint)
    problems = found(ledger, prompts=prompts, queue=queue, order=order).problems
    assert problems == (("epoch 1: its prompts are in the order of epoch 0",) if is_seen else ())


@pytest.mark.parametrize(("in_order", "is_seen"), [(32, False), (33, True)])
def test_an_epoch_of_which_half_came_in_another_s_order_may_be_its_own(in_order, is_seen):
    order = PromptOrder([f"p{n}" for n in range(64)], seed=1, shuffle=True)
    other = order.ids_of(0)
    own = [*reversed(other[in_order:]), *other[:in_order]]
    ledger = [line(step, [one]) for step, one in enumerate([*other, *own])]
    queue = QueueState(step=127, epoch=2, cursor=0, returned=(), fingerprint=order.fingerprint)
    problems = found(ledger, prompts=64, queue=queue, order=order).problems
    assert problems == (("epoch 1: its prompts are in the order of epoch 0",) if is_seen else ())


def test_an_epoch_of_which_no_more_than_half_is_in_its_own_order_may_be_another_s():
    order = PromptOrder([f"p{n}" for n in range(64)], seed=1, shuffle=True)
    other, own = order.ids_of(0), order.ids_of(1)
    for first, in_order, is_seen in ((0, 12, True), (20, 32, True), (21, 33, False)):
        mixed = [*own[:first], *(one for one in other if one not in own[:first])]
        epochs = {0: [(n, [one]) for n, one in enumerate(other)], 1: [(64 + n, [one]) for n, one in enumerate(mixed)]}
        assert ledger_audit._in_order(epochs[1], own) == in_order, first
        assert ledger_audit._in_order(epochs[1], other) > 32
        ledger = [line(step, [*ids]) for uses in epochs.values() for step, ids in uses]
        queue = QueueState(step=127, epoch=2, cursor=0, returned=(), fingerprint=order.fingerprint)
        assert bool(found(ledger, prompts=64, queue=queue, order=order).problems) is is_seen, first


@pytest.mark.parametrize(
    ("returned", "problem"),
    [(("p5",), ""), (("p4", "p5"), "4 prompts used up, not 3"), ((), "4 prompts used up, not 5")],
)
def test_without_the_data_set_the_prompts_up_to_the_checkpoint_are_counted(returned, problem):
    ledger = [line(0, ["p0", "p1"]), line(1, ["p2", "p3"]), line(2, ["p4"])]
    queue = QueueState(step=1, epoch=0, cursor=5, returned=returned, fingerprint="")
    expected = (f"epoch 0 up to the checkpoint of step 1: {problem}",) if problem else ()
    assert found(ledger, queue=queue).problems == expected


def test_a_text_in_the_place_of_prompts_names_none():
    assert "step 1: it names no prompts" in found([line(0, ["a"]), line(1, "bc")]).problems


def test_of_lines_without_a_step_none_is_there_twice():
    assert found(whole_run()[:1], [*metrics(0), {"time": 1.0}, {"time": 1.0}]).problems == ()
