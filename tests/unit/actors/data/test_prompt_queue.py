"""Every prompt exactly once per epoch, whatever fails and wherever a run is cut (P2)."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.data.prompt_queue import PromptQueue
from launcher.base import prompt_order
from launcher.base.errors import CheckpointError, DataError
from launcher.base.rollouts import Completion
from tests.support.worlds.data import IDS, queue, restored

ROOT = Path(__file__).parents[4]
MADE = Completion(token_ids=(1,), logprobs=(-1.0,), weight_version=0, finish_reason="stop")


def epoch_of(prompts, batch=3):
    """The ids of one whole epoch, in the order in which they are taken."""
    order, epoch = [], prompts.epoch
    while prompts.epoch == epoch:
        taken = prompts.take_prompts(batch)
        order += taken
        prompts.commit(taken)
    return order


def test_the_order_is_that_of_every_python_version():
    """Worked out once and written down: a run that resumes under another version goes on in the same order."""
    prompts = queue(["a", "b", "c", "d", "e", "f"], seed=7)
    assert [epoch_of(prompts), epoch_of(prompts)] == [list("dfeacb"), list("fbdaec")]


def test_the_order_depends_on_seed_and_epoch_and_not_on_how_the_data_was_read():
    orders = {seed: epoch_of(queue(seed=seed)) for seed in range(5)}
    assert len({tuple(order) for order in orders.values()}) == 5
    assert epoch_of(queue(IDS[::-1], seed=3)) == orders[3]
    prompts = queue()
    assert epoch_of(prompts) != epoch_of(prompts)


def test_the_order_is_the_same_in_another_process():
    code = (
        "from actors.data.prompt_queue import PromptQueue as Q;"
        "print(*Q([f'p{i}' for i in range(10)], seed=1, shuffle=True).take_prompts(10))"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert answers == {" ".join(queue().take_prompts(10)) + "\n"}


def test_without_shuffling_the_order_is_the_data_sets():
    prompts = queue(shuffle=False)
    assert [epoch_of(prompts), epoch_of(prompts)] == [IDS, IDS]


def test_a_batch_never_crosses_an_epoch():
    prompts = queue()
    sizes = []
    for _ in range(8):
        taken = prompts.take_prompts(4)
        sizes.append((prompts.epoch, len(taken)))
        prompts.commit(taken)
    assert sizes == [(0, 4), (0, 4), (0, 2), (1, 4), (1, 4), (1, 2), (2, 4), (2, 4)]
    assert prompts.steps_per_epoch(4) == 3
    assert prompts.steps_per_epoch(5) == 2


def test_the_next_epoch_waits_for_the_last_prompt():
    prompts = queue()
    taken = prompts.take_prompts(10)
    prompts.commit(taken[:-1])
    assert prompts.take_prompts(1) == []
    assert prompts.epoch == 0
    prompts.commit(taken[-1:])
    assert prompts.epoch == 1
    assert len(prompts.take_prompts(10)) == 10


def test_what_failed_comes_again_after_the_rest_so_that_it_holds_nothing_up():
    prompts = queue(shuffle=False)
    prompts.requeue(prompts.take_prompts(2))
    assert prompts.take_prompts(10) == [*IDS[2:], "p0", "p1"]


def test_what_was_in_flight_is_taken_first_after_a_restore():
    prompts = queue(shuffle=False)
    prompts.commit(prompts.take_prompts(2))
    prompts.requeue(prompts.take_prompts(1))
    prompts.take_prompts(3)
    again = restored(prompts)
    assert again.in_flight == ()
    again.take_prompts(1)
    again = restored(again)
    assert again.take_prompts(10) == ["p3", "p4", "p5", "p6", "p7", "p8", "p9", "p2"]


def test_a_run_that_is_cut_and_resumed_takes_what_the_uncut_one_takes():
    uncut, cut = queue(), queue()
    for step in range(12):
        if step in (2, 5, 7):
            cut.take_prompts(3)  # lost with the process
            cut = restored(cut)
        one, other = uncut.take_prompts(3), cut.take_prompts(3)
        assert one == other
        failed = [one.pop(), other.pop()] if step == 1 else None
        if failed:
            uncut.requeue(failed[:1])
            cut.requeue(failed[1:])
        uncut.commit(one)
        cut.commit(other)
    assert uncut.epoch == cut.epoch == 3


@pytest.mark.parametrize(
    "damage", [{"first": [1]}, {"last": [1]}, {"first": "p1"}, {"last": None}, {"cursor": -1}], ids=str
)
def test_what_is_of_the_wrong_type_is_called_damaged_and_not_contradictory(damage):
    with pytest.raises(CheckpointError, match="the data position is damaged"):
        queue().load_state_dict(queue().state_dict() | damage)


def test_the_format_is_that_of_the_checkpoints_that_are_there():
    assert queue().state_dict()["format"] == 1
    with pytest.raises(DataError, match="format was 2, is 1"):
        queue().load_state_dict(queue().state_dict() | {"format": 2})


def test_the_state_is_small():
    prompts = queue([f"prompt-{i:08}" for i in range(10_000)])
    prompts.commit(prompts.take_prompts(16))
    prompts.take_prompts(16)
    assert len(json.dumps(prompts.state_dict())) < 1000


@pytest.mark.parametrize(
    "misuse", [lambda q: q.commit(["p0"]), lambda q: q.requeue(["p0"]), lambda q: q.take_prompts(0)]
)
def test_misuse_raises(misuse):
    with pytest.raises(ValueError, match=r"p0|batch of 0"):
        misuse(queue())


def test_half_a_commit_is_none():
    prompts = queue()
    taken = prompts.take_prompts(2)
    for wrong in ([*taken, "stranger"], [taken[0], taken[0]]):
        with pytest.raises(ValueError, match="not in flight"):
            prompts.commit(wrong)
    assert prompts.in_flight == tuple(taken)


@pytest.mark.parametrize("ids", [[], ["a", "a"]])
def test_ids_must_be_unique_and_some(ids):
    with pytest.raises(ValueError, match="unique"):
        queue(ids)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 2}, "seed was 1, is 2"),
        ({"shuffle": False}, "shuffle was True, is False"),
        ({"ids": IDS[:-1]}, "prompts was 10, is 9"),
        ({"ids": [*IDS[:-1], "other"]}, "fingerprint was"),
    ],
)
def test_the_state_of_another_data_set_or_seed_is_refused(changes, said):
    saved = queue()
    saved.commit(saved.take_prompts(3))
    other = queue(**changes)
    before = other.state_dict()
    with pytest.raises(DataError, match=said) as error:
        other.load_state_dict(saved.state_dict())
    assert "set train_dataset.* and seed as they were" in error.value.hint
    assert other.state_dict() == before


def test_a_data_set_read_in_another_order_is_the_same_when_shuffled_and_another_when_not():
    queue(IDS[::-1]).load_state_dict(queue().state_dict())
    with pytest.raises(DataError, match="fingerprint was"):
        queue(IDS[::-1], shuffle=False).load_state_dict(queue(shuffle=False).state_dict())


@pytest.mark.parametrize(
    "damage",
    [
        {"cursor": 11},
        {"cursor": -1},
        {"cursor": "3"},
        {"cursor": True},
        {"cursor": None},
        {"epoch": -1},
        {"epoch": 0.5},
        {"first": "p1"},
        {"first": [1]},
        {"first": ["nobody"]},
        {"first": ["p0", "p0"]},
        {"first": ["p1"], "last": ["p1"]},
        {"first": ["p9"]},
        {"last": "p1"},
        {"last": [1]},
        {"last": None},
        {"last": ["nobody"]},
        {"last": ["p9"]},
        {"cursor": 10, "first": [], "last": []},
    ],
    ids=str,
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage):
    saved = queue(shuffle=False)
    saved.commit(saved.take_prompts(5))
    other = queue(shuffle=False)
    with pytest.raises(CheckpointError, match="data position") as error:
        other.load_state_dict(saved.state_dict() | damage)
    assert "recover.mode=off" in error.value.hint
    assert other.take_prompts(1) == ["p0"]


class EveryPromptOncePerEpoch(RuleBasedStateMachine):
    """Beside the queue a model: how often each prompt was trained on, what is in flight, what a checkpoint knows.

    A crash loses the process, and with it the weights since the last checkpoint: what those steps trained on counts
    as not trained, and must come again.
    """

    @initialize(size=st.integers(1, 12), seed=st.integers(0, 3), shuffle=st.booleans())
    def begin(self, size, seed, shuffle):
        self.make = lambda: queue([f"p{i}" for i in range(size)], seed=seed, shuffle=shuffle)
        self.queue = self.make()
        self.size = size
        self.trained = Counter()
        self.in_flight = []
        self.saved = (json.dumps(self.queue.state_dict()), Counter())

    @rule(n=st.integers(1, 6))
    def take(self, n):
        waiting = self.queue.waiting
        taken = self.queue.take_prompts(n)
        assert len(taken) == min(n, waiting)
        assert not set(taken) & set(self.in_flight)
        assert all(self.trained[prompt_id] == self.queue.epoch for prompt_id in taken)
        self.in_flight += taken

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def requeue(self, data):
        self.queue.requeue(self._some(data))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def commit(self, data):
        ids = self._some(data)
        self.trained.update(ids)
        self.queue.commit(ids)

    @precondition(lambda self: self.in_flight)
    @rule()
    def commit_all(self):
        self.trained.update(self.in_flight)
        self.queue.commit(self.in_flight)
        self.in_flight = []

    @rule(ids=st.sets(st.sampled_from(IDS)))
    def bring_forward(self, ids):
        self.queue.bring_forward(dict.fromkeys(ids, ()))

    @rule()
    def save(self):
        self.saved = (json.dumps(self.queue.state_dict()), self.trained.copy())

    @rule(anew=st.booleans())
    def restore(self, anew):
        if anew:
            self.queue = self.make()
        state, trained = self.saved
        self.queue.load_state_dict(json.loads(state))
        self.trained = trained.copy()
        self.in_flight = []

    @invariant()
    def once_per_epoch(self):
        if not hasattr(self, "queue"):
            return
        done = sum(self.trained.values())
        assert self.queue.epoch == done // self.size
        assert {self.trained[f"p{i}"] for i in range(self.size)} <= {self.queue.epoch, self.queue.epoch + 1}
        assert self.queue.waiting + len(self.in_flight) == self.size - done % self.size
        assert sorted(self.queue.in_flight) == sorted(self.in_flight)

    def _some(self, data):
        ids = data.draw(st.lists(st.sampled_from(self.in_flight), min_size=1, unique=True))
        self.in_flight = [prompt_id for prompt_id in self.in_flight if prompt_id not in ids]
        return ids


TestEveryPromptOncePerEpoch = EveryPromptOncePerEpoch.TestCase
TestEveryPromptOncePerEpoch.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_what_a_state_costs_does_not_grow_with_the_data_set(monkeypatch):
    """It is taken after each step. The ids of a million prompts took most of a second to sort and hash each time."""
    hashed = []
    digest = prompt_order._digest
    queue = PromptQueue([f"p{i}" for i in range(100)], seed=1, shuffle=True)
    monkeypatch.setattr(prompt_order, "_digest", lambda *parts: hashed.append(len(parts)) or digest(*parts))
    states = [queue.state_dict() for _ in range(5)]
    assert hashed == [102]
    assert states == [states[0]] * 5


def test_only_what_was_given_back_is_brought_forward():
    made = {one: [MADE] for one in ("p1", "p0", "p4", "p7", "nobody")}
    queue = PromptQueue(IDS, seed=1, shuffle=False)
    taken = queue.take_prompts(5)
    queue.commit(taken[:1])
    queue.requeue(taken[1:3])
    queue.bring_forward(made)
    assert queue.take_prompts(3) == ["p1", "p5", "p6"], "p0 is trained on, p4 in flight, p7 waits for its turn"
    assert [bool(queue.kept(one)) for one in made] == [True, False, False, False, False]
    queue.requeue(["p1"])
    assert queue.kept("p1") == ()
