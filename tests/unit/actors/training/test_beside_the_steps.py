"""What is written beside the next steps: nobody waits for it, and it is what it would be had everybody waited."""

import json
import random
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from actors.model import learner
from actors.model.policy_model import PolicyModel
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoints
from launcher.policy.admission import Admission
from tests.support.machine import scaled
from tests.support.worlds.training import Trial

deadline_s = partial(scaled, 60.0)
SAVED_FIRST, STEPS = 3, 7
"""The step of the first checkpoint."""


def files(trial, step):
    """But for how long the step took."""
    checkpoint = trial.store.find(step)
    assert trial.store.verify(checkpoint) == ()
    content = {path.name: path.read_bytes() for path in checkpoint.path.iterdir() if path.name != "manifest.json"}
    position = json.loads(content["position.json"])
    report = position["report"]
    del report["time"]
    report["metrics"] = {key: value for key, value in report["metrics"].items() if not key.startswith("timeperf/")}
    return content | {"position.json": position}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The files of the first checkpoint of a run that ends with it: nothing is beside it."""
    random.seed(0)  # as each test has them, which begins after what is made for the module
    np.random.seed(0)
    torch.manual_seed(0)
    trial = Trial(tmp_path_factory.mktemp("alone"), steps=SAVED_FIRST + 1, memory=False)
    assert trial.run()
    return files(trial, SAVED_FIRST)


def held_until(monkeypatch, owner, name, event, calls):
    """The first call of it waits for `event`."""
    original = getattr(owner, name)

    def held(*args, **named):
        calls.append(name)
        if len(calls) == 1:
            assert event.wait(deadline_s())
        return original(*args, **named)

    monkeypatch.setattr(owner, name, held)


@pytest.mark.slow
def test_steps_are_taken_while_a_checkpoint_is_written(tmp_path, monkeypatch, expected):
    two_more, calls = threading.Event(), []
    held_until(monkeypatch, CheckpointStore, "commit", two_more, calls)
    seen = []

    def publish(version):
        if version == SAVED_FIRST + 3:
            seen.append((trial.loop._checkpointer.is_saving, trial.store.find(SAVED_FIRST)))
            two_more.set()

    trial = Trial(tmp_path, steps=STEPS, publish=publish)
    assert trial.run()
    assert seen == [(True, None)], "two steps were taken, and it was not there"
    assert files(trial, SAVED_FIRST) == expected
    assert [report.global_step for report in trial.reports] == list(range(STEPS))
    assert {"timeperf/state_s", "timeperf/checkpoint_s"} <= trial.reports[-1].metrics.keys()


@pytest.mark.slow
def test_without_room_for_a_copy_the_next_step_waits_until_the_model_was_read(tmp_path, monkeypatch, expected):
    monkeypatch.setattr(learner, "find_hardware", lambda: SimpleNamespace(memory_free=0))
    order, gradients = [], threading.Event()
    save = PolicyModel.save

    def slow(self, folder, state):
        if not order:
            assert gradients.wait(deadline_s()), "rollouts and gradients don't wait"
        written = save(self, folder, state)
        order.append("saved")
        return written

    def ask(report):
        if report.weight_versions == (SAVED_FIRST + 1,):
            gradients.set()
        return Admission(admitted=True, reason="sound")

    monkeypatch.setattr(PolicyModel, "save", slow)
    trial = Trial(tmp_path, steps=STEPS, ask=ask, publish=lambda version: order.append(version))
    assert trial.run()
    assert order.index("saved") < order.index(SAVED_FIRST + 2)
    assert files(trial, SAVED_FIRST) == expected


@pytest.mark.slow
def test_a_step_is_written_down_after_its_state_and_before_the_next_one_is_taken(tmp_path, monkeypatch):
    gradients, calls, seen = threading.Event(), [], []
    held_until(monkeypatch, PolicyModel, "write_state", gradients, calls)

    def ask(report):
        if not gradients.is_set() and report.weight_versions == (1,):
            seen.append((len(trial.reports), trial.loop.policy_version))
            gradients.set()
        return Admission(admitted=True, reason="sound")

    def publish(version):
        newest = InMemoryCheckpoints(trial.paths).current(trial.store.list())
        seen.append(([one.global_step for one in newest][-1:], len(trial.reports)))

    trial = Trial(tmp_path, steps=3, ask=ask, publish=publish)
    assert trial.run()
    assert seen == [([], 0), (0, 1), ([0], 1), ([1], 2)]
