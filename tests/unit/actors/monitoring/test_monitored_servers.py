"""The monitor asks the servers' actors: what changes is known at once, and nothing waits for one that is silent."""

import asyncio

import pytest

from actors.cluster.actor_calls import ActorAway
from actors.monitoring import health_monitor
from actors.monitoring.health_monitor import ANSWER_S, FRESH_S, HOLD_S, HealthMonitor, ServerPoll
from actors.monitoring.reward_series import RewardSeries
from actors.serving.server_report import ServerWork
from launcher.base.messages import Cause, Health, ServerExit, Verdict
from launcher.policy.admission import Admission
from tests.support.fake_actors import never
from tests.support.machine import scaled
from tests.support.worlds.health_monitor import SERVES, Server, batch, use, watched
from tests.support.worlds.health_monitor import world as world

HUNG = Verdict(health=Health.DEAD, reason="http stopped for 1.3 s", cause=Cause.SERVER_HANG)
END = ServerExit(name="server-0", generation=0, pid=7, exit_code=-9, reason="killed", age_s=0.5)


async def until(monitor, holds):
    while not holds(found := monitor.report().servers.get("server-0")):
        await asyncio.sleep(0)
    return found


def test_a_fault_in_the_steps_that_a_restore_undid_explains_no_later_fall(world):
    """A server of step 61 was said to be the cause when the rewards fell there again, after a restore."""
    world.steps(61)
    world.config.gate.max_reward_jump = None

    def fall(monitor):
        while (found := monitor.report().incident) is None:
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
    world.servers["server-0"] = Server()

    async def work(monitor):
        ended = Verdict(health=Health.DEAD, reason="gone", cause=Cause.SERVER_CRASH)
        await watched(monitor)
        world.servers["server-0"].tell(verdict=ended)
        while monitor.report().servers["server-0"].verdict != ended:
            await asyncio.sleep(0)
        while (found := monitor.report().incident) is None:
            monitor.admit(batch(monitor._series.next_step, mean_reward=0.0, high_reward=0.0))
        return found

    found = use(world, work)
    assert (found.cause, found.subject) == (Cause.REWARD_COLLAPSE, "policy")


def test_a_hang_is_recorded_once_and_forgotten_with_the_next_incarnation(world):
    world.servers["server-0"] = first = Server()

    async def work(monitor):
        await watched(monitor)
        first.tell(verdict=HUNG)
        dead = await until(monitor, lambda seen: seen.verdict == HUNG)
        first.tell(verdict=Verdict(health=Health.DEAD, reason="for longer", cause=Cause.SERVER_HANG))
        await until(monitor, lambda seen: seen.verdict.reason == "for longer")
        world.servers["server-0"] = Server()
        back = (await watched(monitor, generation=1))["server-0"]
        monitor.watch({})
        return dead, back, monitor.report().servers

    dead, back, none = use(world, work)
    assert (dead.ordered, back.ordered, back.verdict, none) == (0, 1, SERVES, {})
    (recorded,) = world.events("health.dead")
    assert (recorded["generation"], recorded["cause"]) == (0, "server_hang")
    assert recorded["at"] > 0


def test_that_one_could_not_be_watched_is_recorded_once(world):
    world.servers["server-0"] = one = Server(blind="OSError(24)")

    async def work(monitor):
        await watched(monitor)
        one.tell(verdict=HUNG)
        await until(monitor, lambda seen: seen.verdict == HUNG)

    use(world, work)
    (told,) = world.events("health.blind")
    assert "OSError(24)" in told["reason"]


def test_the_monitor_answers_while_a_server_hangs(world):
    """A blocked server costs its own poll alone: each question is answered within one turn of the loop."""
    world.servers["server-0"] = Server()
    world.servers["server-0"].report = lambda work: never()

    async def work(monitor):
        monitor.watch({"server-0": ServerWork(generation=0)})
        await asyncio.sleep(0)
        return monitor.admit(batch(0)).admitted, dict(monitor.report().servers)

    assert use(world, work) == (True, {})


class Clocked:
    """A monitor whose clock is the test's."""

    def __init__(self, world):
        self.now = 0.0
        self.monitor = HealthMonitor(
            world.config, world.journal, world.ask, series=RewardSeries.read(world.paths), clock=lambda: self.now
        )


async def test_an_actor_that_does_not_answer_makes_its_server_unknown_and_never_dead(world, monkeypatch):
    """P7. How often it was asked in vain is counted; an answer ends that."""
    monkeypatch.setattr(health_monitor, "AGAIN_S", 0.0)
    world.servers["server-0"] = one = Server()
    one_clock = Clocked(world)
    monitor = one_clock.monitor
    await watched(monitor)
    answers = one.report

    async def late(work):
        raise ActorAway("server-0 did not answer within 3.5 s") from TimeoutError()

    one.report = late
    one.tell()
    await until(monitor, lambda seen: seen.silent_s >= 3 * (HOLD_S + ANSWER_S))
    one_clock.now += FRESH_S + 0.1
    seen = monitor.report().servers["server-0"]
    assert seen.verdict.health is Health.UNKNOWN
    one.report = answers
    one.tell()
    assert (await until(monitor, lambda seen: not seen.silent_s)).verdict == SERVES
    await monitor.close()


async def test_that_an_actor_is_silent_is_known_to_a_monitor_that_began_after_its_last_answer(world, monkeypatch):
    """It reported nothing of such a server: nobody restarted it, and with one server the run waited for ever."""
    monkeypatch.setattr(health_monitor, "AGAIN_S", 0.0)

    async def away(name, work, hold_s):
        raise ActorAway("server-0 did not answer within 3.5 s") from TimeoutError()

    poll = ServerPoll("server-0", ServerWork(generation=0), away, proof_s=30.0, changed=lambda name, report: None)
    assert poll.report() is None
    asking = asyncio.create_task(poll.run())
    async with asyncio.timeout(scaled(30.0)):
        while poll.report() is None or poll.report().silent_s < 3 * (HOLD_S + ANSWER_S):
            await asyncio.sleep(0)
    asking.cancel()
    assert (poll.report().info, poll.report().verdict.health) == (None, Health.UNKNOWN)


async def test_an_end_is_told_also_after_the_question_for_it_failed_once(world, monkeypatch):
    """A call that Ray lost: without another question a crash would have no `server.died` and no exit code."""
    monkeypatch.setattr(health_monitor, "AGAIN_S", 0.0)
    world.servers["server-0"] = one = Server()
    monitor = world.monitor()
    await watched(monitor)
    answers, lost = one.report, []

    async def lost_once(work):
        one.report = answers
        lost.append(work)
        raise ActorAway("the connection was reset")

    one.report = lost_once
    one.tell()
    while not lost:
        await asyncio.sleep(0)
    one.tell(end=END)
    assert (await until(monitor, lambda seen: seen.end is not None)).end.exit_code == -9
    await monitor.close()


async def test_an_end_grows_older_here_and_stays_true(world, monkeypatch):
    world.servers["server-0"] = Server(end=END, verdict=HUNG)
    one = Clocked(world)
    await watched(one.monitor)
    one.now += FRESH_S + 1.0
    seen = one.monitor.report().servers["server-0"]
    assert (seen.end.age_s, seen.verdict) == (pytest.approx(0.5 + FRESH_S + 1.0), HUNG)
    await one.monitor.close()


async def test_what_a_server_has_to_do_grows_older_on_its_way_and_is_forgotten(world):
    world.servers["server-0"] = server = Server()
    one = Clocked(world)
    loading = ServerWork(generation=0, waiting=8, loading_s=2.0, loading_limit_s=60.0)
    one.monitor.watch({"server-0": loading})

    async def asked_again(after_s):
        one.now += after_s
        before = len(server.asked)
        server.tell()
        while len(server.asked) == before:
            await asyncio.sleep(0)
        return server.asked[-1]

    while not server.asked:
        await asyncio.sleep(0)
    assert server.asked[0] == loading
    assert (await asked_again(0.3)).loading_s == pytest.approx(2.3)
    assert await asked_again(one.monitor._config.health.proof_s) == ServerWork(generation=0)
    await one.monitor.close()
