"""A pid of another node is not looked at here, and a time of another clock is put on this one's."""

import os

import pytest

from actors.cluster import node_identity
from actors.cluster.node_identity import is_here
from actors.supervision.trainer_handle import TrainerWatch
from launcher.base.clocks import clock_shift
from launcher.base.messages import TrainerView
from launcher.config.supervision import HealthConfig


@pytest.fixture
def on_node(monkeypatch):
    monkeypatch.setattr(node_identity, "this_node", lambda: "mine")


def test_clocks_that_agree_are_left_alone():
    assert clock_shift(100.0, 100.3) == 0.0
    assert clock_shift(100.0, 5000.0) == 4900.0


def test_no_node_is_this_one(on_node):
    assert is_here("")
    assert is_here("mine")
    assert not is_here("other")


def test_a_trainer_of_another_node_is_not_looked_at_by_its_pid(on_node):
    """The pid of this very process, which is another process there."""
    clock = [0.0]
    watch = TrainerWatch(HealthConfig(), clock=lambda: clock[0])
    view = TrainerView(pid=os.getpid(), node="other", is_started=True, is_allowed=True)
    watch.observe_view(view, heard_at=0.0, is_asked=False)
    assert watch._evidence.look.state is None
    watch.observe_view(TrainerView(pid=os.getpid(), node="mine", is_started=True), heard_at=0.0, is_asked=False)
    assert watch._evidence.look.state in ("R", "S")
