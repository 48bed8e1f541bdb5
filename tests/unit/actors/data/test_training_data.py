"""Several data sets with weights: e epochs have each record weight·e times, whatever fails, wherever a run is cut."""

import json
import math
import random
from collections import Counter

import pytest

from actors.data.prompt_queue import PromptQueue
from actors.data.training_data import in_epoch, mixed
from launcher.base.errors import DataError
from launcher.base.prompt_order import share_of
from launcher.base.rollouts import Prompt
from launcher.reporting.ledger_audit import audit

WEIGHTS = {"a": (1.0, 7), "b": (0.5, 10), "c": (2.0, 3), "d": (1.25, 8), "e": (0.3, 10), "f": (0.01, 4)}


def mixture(weights=WEIGHTS, seed=1, shuffle=True):
    ids, circles = [], []
    for name, (weight, count) in weights.items():
        prompts, circle = mixed([Prompt(id=f"{name}:{i}", token_ids=(), record={}) for i in range(count)], weight)
        ids += [prompt.id for prompt in prompts]
        circles += [circle] if circle else []
    return PromptQueue(ids, seed=seed, shuffle=shuffle, circles=circles)


def trained_on(queue, epochs, *, faults=None, batch=4):
    """Ids of each committed batch. `faults`: batches that fail, and cuts after which another queue continues."""
    batches = []
    while queue.epoch < epochs:
        taken = queue.take_prompts(batch)
        what = faults.choice(["fail", "cut", "", "", ""]) if faults else ""
        if what == "fail":
            queue.requeue(taken)
        elif what == "cut":
            state = json.loads(json.dumps(queue.state_dict()))
            queue = mixture(seed=queue.prompt_order.seed, shuffle=queue.prompt_order.shuffle)
            queue.load_state_dict(state)
        else:
            queue.commit(taken)
            batches.append(taken)
    return batches


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_each_record_is_trained_on_as_often_as_its_weight_says(seed, shuffle):
    for epochs in (1, 2, 5, 12):
        batches = trained_on(mixture(seed=seed, shuffle=shuffle), epochs, faults=random.Random(seed))
        times = Counter(one.partition("*")[0] for batch in batches for one in batch)
        for name, (weight, count) in WEIGHTS.items():
            per_epoch = in_epoch(weight, count) / count  # the weight, to one record
            assert abs(per_epoch - weight) <= 0.5 / count or weight * count < 0.5
            allowed = {math.floor(per_epoch * epochs + 1e-9), math.ceil(per_epoch * epochs - 1e-9)}
            assert {times[f"{name}:{i}"] for i in range(count)} <= allowed, (name, epochs)


def test_an_epoch_has_each_record_as_itself_before_it_has_one_as_a_copy():
    queue = mixture({"d": (1.25, 8)})
    for epoch in range(3):
        ids = queue.prompt_order.ids_of(epoch)
        assert {f"d:{n}" for n in range(8)} <= {*ids}
        assert len(ids) == 10


def test_every_epoch_is_as_long_and_has_no_prompt_twice():
    queue = mixture()
    assert len(queue) == 7 + 5 + 6 + 10 + 3 + 1
    batches = trained_on(queue, 6, faults=random.Random(3))
    lines = [
        {"global_step": n, "prompt_ids": batch, "weight_versions": [n], "attempt": 1} for n, batch in enumerate(batches)
    ]
    assert not audit(lines, lines, prompts=len(queue)).problems
    lines[1]["prompt_ids"] = [*lines[1]["prompt_ids"], lines[0]["prompt_ids"][0]]
    assert any("a second time in its epoch" in problem for problem in audit(lines, lines, prompts=len(queue)).problems)


def test_a_run_that_is_cut_continues_as_the_one_that_was_not():
    whole = trained_on(mixture(), 4)
    for steps in range(1, len(whole)):
        queue, again = mixture(), mixture()
        for batch in whole[:steps]:
            assert queue.take_prompts(4) == batch
            queue.commit(batch)
        again.load_state_dict(json.loads(json.dumps(queue.state_dict())))
        assert trained_on(again, 4) == whole[steps:]


def test_with_another_weight_a_resume_is_refused():
    for changed in ({"b": (0.6, 10)}, {"c": (1.0, 3)}, {"b": (0.5, 11)}):
        with pytest.raises(DataError, match="the data set, its order or the seed is not the checkpoint's"):
            mixture(WEIGHTS | changed).load_state_dict(mixture().state_dict())


def test_weight_one_is_what_one_data_set_always_was():
    ids = [f"a:{i}" for i in range(7)]
    alone, one = PromptQueue(ids, seed=1, shuffle=True), mixture({"a": (1.0, 7)})
    assert one.state_dict() == alone.state_dict()
    assert one.take_prompts(7) == alone.take_prompts(7)


def test_a_small_weight_has_at_least_one_record():
    assert [share_of(weight, 4) for weight in (0.01, 0.5, 1.0, 2.5, 0.99)] == [(0, 1), (0, 2), (1, 0), (2, 2), (1, 0)]
