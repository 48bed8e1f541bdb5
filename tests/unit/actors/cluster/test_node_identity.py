"""Times of another machine's clock are put on this one's, and a pid of another node is not looked at here."""

import os
import time

import pytest

from actors.cluster import node_identity
from actors.cluster.node_identity import is_here, on_this_clock
from actors.monitoring.trainer_watch import TrainerWatch
from actors.processes.process_tree import identify
from actors.serving.remote_process_probe import FRESH_S, RemoteObservation, RemoteProcessProbe, RemoteProcessTree
from launcher.base.clocks import clock_shift
from launcher.base.errors import RunError
from launcher.base.messages import ServerExit, TrainerView
from launcher.config.supervision import HealthConfig
from launcher.policy.observation_history import ProcessLook


@pytest.fixture
def on_node(monkeypatch):
    monkeypatch.setattr(node_identity, "this_node", lambda: "mine")


def end(node: str, *, ago_s: float, monotonic: float) -> ServerExit:
    return ServerExit(
        name="server-0",
        generation=0,
        pid=1,
        exit_code=-9,
        reason="",
        at=time.time() - ago_s,
        monotonic=monotonic,
        node=node,
    )


def test_an_end_on_another_machine_is_timed_by_the_wall_clock(on_node):
    told = on_this_clock(end("other", ago_s=2.0, monotonic=9e9))
    assert time.monotonic() - told.monotonic == pytest.approx(2.0, abs=0.5)
    mine = end("mine", ago_s=2.0, monotonic=5.0)
    assert on_this_clock(mine) is mine


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
    watch.look(view, heard_at=0.0, is_asked=False)
    assert watch._evidence.look.state is None
    watch.look(TrainerView(pid=os.getpid(), node="mine", is_started=True), heard_at=0.0, is_asked=False)
    assert watch._evidence.look.state in ("R", "S")


async def look_until(tree: RemoteProcessTree, holds) -> None:
    import asyncio

    async with asyncio.timeout(10):
        while not holds():
            tree.look()
            await asyncio.sleep(0.01)


async def test_a_far_server_is_seen_through_its_actor_and_an_old_look_shows_nothing():
    now, away, sight = [100.0], [False], RemoteProcessProbe()

    async def ask() -> RemoteObservation:
        if away[0]:
            raise RunError("its actor is away")
        return sight.look(os.getpid())

    tree = RemoteProcessTree(ask, clock=lambda: now[0])
    assert tree.look() is None, "nothing is known yet"
    await look_until(tree, lambda: tree.look() is not None)
    assert isinstance(tree.look()["http"], ProcessLook)
    assert tree.pids() == {"http": os.getpid()}
    assert not tree.is_gone()
    away[0] = True
    now[0] += FRESH_S + 1
    assert tree.look() is None
    assert not tree.is_gone(), "what can't be seen is not gone"
    await tree.close()


def test_a_life_that_ended_there_is_gone():
    found = RemoteProcessProbe().look(2**22 - 3)
    assert identify(2**22 - 3) is None
    assert found.is_gone
