"""The monitor watches real processes: a hang is seen once, and nothing else waits for it."""

import asyncio
import os
import signal

import pytest

from actors.monitoring.monitor_view import Watched
from actors.serving.server_processes import ServerProcesses
from launcher.base.messages import Cause, Health, Verdict
from launcher.policy.admission import Admission
from tests.programs import stand_in_server
from tests.support.worlds.health_monitor import batch, server, use, world
from tests.support.worlds.server_watch import QUICK, fault, tree

__all__ = ["world"]  # the fixture


async def until(monitor, targets, health):
    while (view := look(monitor, targets)).servers[0].verdict.health is not health:
        await asyncio.sleep(QUICK.look_interval_s)
    return view.servers[0]


def look(monitor, targets):
    monitor.watch(targets)
    return monitor.view()


def test_a_fault_in_the_steps_that_a_restore_undid_explains_no_later_fall(world):
    """A server of step 61 was said to be the cause when the rewards fell there again, after a restore."""
    world.steps(61)
    world.config.gate.max_reward_jump = None

    def fall(monitor):
        while (found := monitor.view().incident) is None:
            monitor.admit(batch(monitor._series.next_step, mean_reward=0.0, high_reward=0.0))
        return found

    def work(monitor):
        stale = {"cause": Cause.SERVER_STALE, "subjects": ("server-0",)}
        monitor._doubt(Admission(admitted=False, reason="older weights", **stale))
        first = fall(monitor)
        monitor.restored(55, first.onset_step)
        for step in range(56, 61):
            monitor.admit(batch(step))
        return first, fall(monitor)

    first, second = use(world, work)
    assert (first.cause, second.cause) == (Cause.SERVER_STALE, Cause.REWARD_COLLAPSE)


def test_a_server_that_ended_when_the_rewards_fell_is_not_their_cause(world):
    """It was named, and the checkpoint with the weights that had collapsed was taken for a good one."""
    world.steps(61)
    world.config.gate.max_reward_jump = None

    def work(monitor):
        ended = Verdict(health=Health.DEAD, reason="gone", cause=Cause.SERVER_CRASH)
        monitor._record_verdict(server(1, "http://127.0.0.1:9"), ended)
        while (found := monitor.view().incident) is None:
            monitor.admit(batch(monitor._series.next_step, mean_reward=0.0, high_reward=0.0))
        return found

    found = use(world, work)
    assert (found.cause, found.subject) == (Cause.REWARD_COLLAPSE, "policy")


@pytest.mark.slow
def test_a_hang_is_seen_journaled_once_and_forgotten_with_the_next_life(world, tmp_path):
    async def work(monitor):
        first = [Watched(server=server(one.pid, url))]
        await until(monitor, first, Health.HEALTHY)
        await fault(url, kind="slow", times=None, seconds=600)
        os.kill(monitor.pids()["server-0"]["scheduler"], signal.SIGSTOP)
        dead = await until(monitor, first, Health.DEAD)
        await fault(url, kind="none")
        back = await until(monitor, [Watched(server=server(two.pid, url, generation=1))], Health.HEALTHY)
        return dead, back, look(monitor, [])

    running = stand_in_server.running("--weight-version", "0")
    with running as url, tree(tmp_path / "a") as one, tree(tmp_path / "b") as two:
        dead, back, none = use(world, work)
    assert (dead.generation, dead.verdict.cause) == (0, Cause.SERVER_HANG)
    assert back.generation == 1
    assert none.servers == ()
    assert len(world.events("health.dead")) == 1
    assert world.events("health.dead")[0]["at"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), KeyError("a defect")])
def test_a_server_that_could_not_be_looked_at_once_is_looked_at_again(world, tmp_path, monkeypatch, error):
    """Its watch had ended unheard, and no hang of that life was ever seen."""
    look_at, fails = ServerProcesses.look, []

    def look_or_fail(tree):
        if fails:
            raise fails.pop()
        return look_at(tree)

    monkeypatch.setattr(ServerProcesses, "look", look_or_fail)

    async def work(monitor):
        targets = [Watched(server=server(process.pid, url))]
        await until(monitor, targets, Health.HEALTHY)
        monitor.admit(batch(0, weight_versions=(7,)))
        doubt = monitor.view().servers[0].doubt
        for _ in range(2):
            fails.append(error)
            while fails or not monitor._running["server-0"].done():
                await asyncio.sleep(QUICK.look_interval_s)
            await until(monitor, targets, Health.HEALTHY)
        await fault(url, kind="slow", times=None, seconds=600)
        os.kill(monitor.pids()["server-0"]["scheduler"], signal.SIGSTOP)
        return doubt, await until(monitor, targets, Health.DEAD)

    with stand_in_server.running("--weight-version", "0") as url, tree(tmp_path) as process:
        doubt, dead = use(world, work)
    assert dead.verdict.cause is Cause.SERVER_HANG
    assert doubt
    assert dead.doubt == doubt
    (told,) = world.events("health.blind")
    assert repr(error) in told["reason"]


@pytest.mark.slow
def test_the_monitor_answers_while_a_server_hangs(world, tmp_path):
    """A blocked server costs its own probe alone: each question is answered within one turn of the loop."""

    async def work(monitor):
        monitor.watch([Watched(server=server(process.pid, url))])
        await fault(url, kind="slow", times=None, seconds=600)
        os.kill(process.pid, signal.SIGSTOP)
        await asyncio.sleep(0)
        return monitor.admit(batch(0)).admitted, monitor.view().servers[0].name

    with stand_in_server.running() as url, tree(tmp_path) as process:
        assert use(world, work) == (True, "server-0")
