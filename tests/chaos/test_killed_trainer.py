"""SIGKILL at any moment of a trainer's life: no step that was done is lost, none is taken twice, and what comes out is
bit for bit what comes out without a kill.

`python -m pytest tests/chaos/test_killed_trainer.py --kills 50` kills more often than the suite does.
"""

import random
import signal
from itertools import pairwise
from statistics import median

import pytest
import torch
from safetensors.torch import load_file

from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoints
from tests.programs.killed_trainer import MOMENTS, Trainers

FEW = 12
BESIDE = {"rollout", "backward", "checkpoint written", "checkpoint renamed", "checkpoints pruned"}
"""What goes on while the state of the last step is written, and may come before its rename: these rollouts take no
time."""
FINISHED = 0


@pytest.fixture(scope="module")
def n_kills(request):
    return request.config.getoption("--kills") or FEW


@pytest.fixture(scope="module")
def trainers(n_kills):
    trainers = Trainers(max(110, 8 * n_kills))
    yield trainers
    trainers.close()


@pytest.fixture(scope="module")
def whole(trainers, tmp_path_factory):
    """The run that nobody kills."""
    root = tmp_path_factory.mktemp("whole")
    assert trainers.live(root)["exit_code"] == FINISHED
    return root


@pytest.fixture
def root(trainers, tmp_path):
    yield tmp_path
    InMemoryCheckpoints(trainers.paths(tmp_path)).remove()


def step_seconds(trainers, root, whole):
    """Of the last steps of this run: on a machine that has become quiet a time that was eight steps is many more, and a
    life would come to its end. Before its first, of the whole run."""
    lines = trainers.lines(root, "metrics.jsonl") or trainers.lines(whole, "metrics.jsonl")
    return median(line["timeperf/step_s"] for line in lines[-8:])


def end_state(trainers, root):
    newest = CheckpointStore(trainers.paths(root).default_checkpoints).list()[-1]
    assert newest.global_step == trainers.steps - 1
    return load_file(newest.path / "model.safetensors") | load_file(newest.path / "training_state.tensors")


def killed(trainers, root, **how):
    """One life that is killed. It began behind all that was written down, or one further: a state without its line."""
    lives, written = len(trainers.lines(root, "lives.jsonl")), len(trainers.lines(root, "ledger.jsonl"))
    assert trainers.live(root, **how)["exit_code"] == -signal.SIGKILL, "it came to its end before it was killed"
    if how.get("memory", True) and len(begun := trainers.lines(root, "lives.jsonl")) > lives:
        assert begun[-1]["next_step"] - written in (0, 1)


def check_nothing_lost(trainers, root, whole):
    """One line for each step and no other, and the same weights, moments and random states at the end."""
    ledger = trainers.lines(root, "ledger.jsonl")
    assert ledger == trainers.lines(whole, "ledger.jsonl"), "one line for each step, none taken back"
    steps = [line["global_step"] for line in trainers.lines(root, "metrics.jsonl")]
    assert steps == list(range(trainers.steps))
    left, right = end_state(trainers, root), end_state(trainers, whole)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
    assert not InMemoryCheckpoints(trainers.paths(root)).root.exists(), "a run that is over leaves nothing in memory"


def is_ahead(trainers, root):
    """Whether the last step that was published has no state, and is taken again."""
    paths = trainers.paths(root)
    checkpoints = CheckpointStore(paths.default_checkpoints).list()
    states = [*checkpoints, *InMemoryCheckpoints(paths).current(checkpoints)]
    published = trainers.lines(root, "published.jsonl")[-1]["version"]
    return published - 1 > max((state.global_step for state in states), default=-1)


def may_be_ahead(moment, when):
    return moment in BESIDE or (moment.startswith("state") and (moment, when) != ("state renamed", "after"))


def check_taken_steps(trainers, root, kills):
    """How many steps an optimizer had taken, and a later life took again: of each life at most the one in flight."""
    published = [line["version"] for line in trainers.lines(root, "published.jsonl")]
    again = [(last, version) for last, version in pairwise(published) if version <= last]
    assert all(version == last for last, version in again)
    assert len(again) <= kills
    return len(again)


def test_killed_at_random_moments(trainers, whole, root, n_kills):
    draw = random.Random(11)
    for _ in range(n_kills):
        killed(trainers, root, after_s=draw.uniform(0.0, 8.0) * step_seconds(trainers, root, whole))
    assert trainers.live(root)["exit_code"] == FINISHED
    check_nothing_lost(trainers, root, whole)
    in_flight = check_taken_steps(trainers, root, n_kills)
    print(f"{n_kills} kills, {trainers.steps} steps: 0 lost, 0 taken twice; {in_flight} optimizer steps were in flight")


def test_killed_before_and_after_all_that_a_step_does(trainers, whole, root):
    draw, n_ahead = random.Random(12), 0
    for moment in MOMENTS:
        for when in ("before", "after"):
            is_rare = moment.startswith("checkpoint")
            nth = 1 if is_rare else draw.randint(2, 5)
            killed(trainers, root, moment=moment, nth=nth, when=when)
            if is_ahead(trainers, root):
                assert may_be_ahead(moment, when), f"killed {when} {moment}"
                n_ahead += 1
    assert trainers.live(root)["exit_code"] == FINISHED
    check_nothing_lost(trainers, root, whole)
    check_taken_steps(trainers, root, n_ahead)


def test_without_the_state_in_memory_a_kill_takes_steps_back(trainers, root):
    # a line of each file for four steps; lines of events are not appended one by one
    killed(trainers, root, moment="ledger, metrics", nth=8, when="after", memory=False)
    killed(trainers, root, moment="ledger, metrics", nth=8, when="after", memory=False)
    steps = [line["global_step"] for line in trainers.lines(root, "ledger.jsonl")]
    assert steps == [0, 1, 2, 3, 0, 1, 2, 3]
