"""A watch sees real processes, real counts and real answers: what is stopped is condemned, what is slow is not."""

import asyncio
import dataclasses
import os
import signal
import time

import pytest

from actors.processes.process_tree import Process, identify
from actors.serving import server_watch
from actors.serving.server_processes import ServerProcesses
from actors.serving.server_report import ServerWork
from actors.serving.server_watch import GenerationProbe, ServerWatch
from actors.serving.sglang_client import SGLangClient
from launcher.base.messages import Cause, Health, ServerInfo, ServerState
from tests.programs import stand_in_server
from tests.support.worlds.server_watch import QUICK, deadline_s, fault, tree

URL_OF_NOBODY = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def stand_in():
    with stand_in_server.running("--weight-version", "0") as url:
        yield url


def server(pid, url):
    return ServerInfo(name="server-0", index=0, generation=0, state=ServerState.READY, url=url, pid=pid)


class Seen:
    """A running watch; `until` waits for a verdict, and `all` are those that it changed to."""

    def __init__(self, info, client, settings):
        self.all = []
        self.watch = ServerWatch(info, settings, client, changed=self._take)
        self._running = asyncio.create_task(self.watch.run())

    def _take(self):
        self.all.append(self.watch.verdict())

    async def until(self, health):
        async with asyncio.timeout(deadline_s()):
            while self.watch.verdict().health is not health:
                await asyncio.sleep(QUICK.look_interval_s)
        return self.watch.verdict()

    async def end(self):
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)


def watch(work, pid, url, settings=QUICK):
    async def inside():
        async with SGLangClient() as client:
            seen = Seen(server(pid, url), client, settings)
            try:
                await seen.until(Health.HEALTHY)
                return await work(seen)
            finally:
                await seen.end()
                await fault(url, kind="none")

    return asyncio.run(inside())


# ── the tree ──


def test_roles_states_and_tokens_are_those_of_the_tree(tmp_path):
    with tree(tmp_path) as process:
        seen = ServerProcesses(identify(process.pid))
        assert set(seen.look_at_processes()) == {"http", "scheduler", "detokenizer"}
        assert seen.pids()["http"] == process.pid
        first = seen.tokens()
        assert 3 <= first < 1e6  # of the one series, and not of the one that counts finished requests
        while seen.tokens() == first:
            pass
        os.kill(seen.pids()["scheduler"], signal.SIGSTOP)
        while seen.look_at_processes()["scheduler"].state != "T":
            pass
        assert seen.tokens() == seen.tokens()
        os.kill(seen.pids()["detokenizer"], signal.SIGKILL)
        while "detokenizer" in seen.look_at_processes():
            pass
        assert not seen.is_gone()
    assert seen.is_gone()
    assert seen.look_at_processes() == {}


def test_tokens_that_can_not_be_seen_are_none_and_not_zero(tmp_path):
    with tree(tmp_path, "--no-tokens") as process:
        seen = ServerProcesses(identify(process.pid))
        seen.look_at_processes()
        assert seen.tokens() is None


def test_a_later_process_of_the_same_pid_is_not_the_server():
    me = identify(os.getpid())
    assert not ServerProcesses(me).is_gone()
    assert ServerProcesses(Process(me.pid, me.started - 1)).is_gone()


# ── hangs ──


@pytest.mark.slow
@pytest.mark.parametrize("role", ["http", "scheduler", "detokenizer"])
def test_a_stopped_process_is_a_hang_whatever_else_answers(tmp_path, stand_in, role):
    async def work(seen):
        os.kill(seen.watch.pids()[role], signal.SIGSTOP)
        return await seen.until(Health.DEAD)

    with tree(tmp_path) as process:
        verdict = watch(work, process.pid, stand_in)
    assert verdict.cause is Cause.SERVER_HANG
    assert f"{role} stopped" in verdict.reason


@pytest.mark.slow
def test_one_that_is_stopped_and_continued_again_and_again_is_no_hang(tmp_path, stand_in):
    """Each stop is seen, and its time begins anew."""

    async def stopped_s(seen, holds):
        async with asyncio.timeout(deadline_s()):
            while not holds(seen.watch._evidence.stopped_s):
                await asyncio.sleep(0)

    async def work(seen):
        for _ in range(5):
            os.kill(seen.watch.pids()["detokenizer"], signal.SIGSTOP)
            await stopped_s(seen, lambda seconds: seconds > 0)
            os.kill(seen.watch.pids()["detokenizer"], signal.SIGCONT)
            await stopped_s(seen, lambda seconds: seconds == 0)
        return seen.all

    with tree(tmp_path) as process:
        seen = watch(work, process.pid, stand_in, dataclasses.replace(QUICK, stopped_s=deadline_s()))
    assert {v.health for v in seen} <= {Health.UNKNOWN, Health.HEALTHY}


@pytest.mark.slow
def test_a_stop_and_another_one_are_told_apart(tmp_path):
    """Met stopped at both looks, with no CPU time between them that would show."""
    with tree(tmp_path) as process:
        seen = ServerProcesses(identify(process.pid))
        seen.look_at_processes()
        pid = seen.pids()["detokenizer"]

        def stopped():
            os.kill(pid, signal.SIGSTOP)
            while (look := seen.look_at_processes()["detokenizer"]).state != "T":
                pass
            return look

        first = stopped()
        assert seen.look_at_processes()["detokenizer"] == first
        os.kill(pid, signal.SIGCONT)
        while seen.look_at_processes()["detokenizer"].state == "T":
            pass
        second = stopped()
    assert second.switches > first.switches


@pytest.mark.slow
def test_an_overdue_answer_while_tokens_are_made_is_a_busy_server(tmp_path, stand_in):
    async def work(seen):
        await fault(stand_in, kind="slow", times=None, seconds=600)
        seen.watch.take_work(ServerWork(generation=0, waiting=8))
        async with asyncio.timeout(deadline_s()):
            while "unanswered" not in seen.watch.verdict().reason:
                await asyncio.sleep(QUICK.look_interval_s)
        return seen.all

    with tree(tmp_path) as process:
        assert {v.health for v in watch(work, process.pid, stand_in)} <= {Health.UNKNOWN, Health.HEALTHY}


@pytest.mark.slow
def test_a_server_at_a_long_task_is_not_asked_for_tokens(tmp_path, stand_in):
    """A load of weights aborts what is generated, and a slow one is no hang."""

    async def work(seen):
        await fault(stand_in, kind="slow", times=None, seconds=600)
        now = seen.watch._clock()
        while seen.watch._clock() - now < 3 * QUICK.silence_s:
            loading_s = seen.watch._clock() - now
            seen.watch.take_work(ServerWork(generation=0, waiting=8, loading_s=loading_s, loading_limit_s=600))
            await asyncio.sleep(QUICK.look_interval_s)
        return seen.all

    with tree(tmp_path) as process:
        assert Health.DEAD not in {v.health for v in watch(work, process.pid, stand_in)}


@pytest.mark.slow
async def test_a_lost_probe_does_not_keep_the_next_from_being_asked(stand_in):
    async with SGLangClient() as client:
        probe = GenerationProbe(stand_in, client, QUICK, time.monotonic)
        await fault(stand_in, kind="slow", times=1, seconds=600)
        async with asyncio.timeout(deadline_s()):
            while probe.answered_at is None:
                probe.send_if_due()
                await asyncio.sleep(QUICK.look_interval_s)
        await probe.close()
    assert not probe.waits
    assert probe.usual_answer_s < QUICK.silence_s  # of the one that was answered


async def test_of_one_that_is_gone_its_host_may_tell_the_reason_for_a_while_and_then_it_is_a_crash(tmp_path):
    """The reason decides what is changed before the next start; a host that is stopped tells none."""
    now = [0.0]
    async with SGLangClient() as client:
        with tree(tmp_path) as process:
            alone = ServerWatch(server(process.pid, URL_OF_NOBODY), QUICK, client, clock=lambda: now[0])
        before = alone.verdict()
        now[0] += server_watch.REASON_S
        after = alone.verdict()
    assert (before.health, before.cause) == (Health.SUSPECT, None)
    assert (after.health, after.cause) == (Health.DEAD, Cause.SERVER_CRASH)


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), KeyError("a defect")])
async def test_a_server_that_could_not_be_looked_at_once_is_looked_at_again(tmp_path, monkeypatch, error):
    """Its watch had ended unheard, and no hang of that life was ever seen."""
    look_at, fails = ServerProcesses.look_at_processes, [error]

    def look_or_fail(tree):
        if fails:
            raise fails.pop()
        return look_at(tree)

    monkeypatch.setattr(ServerProcesses, "look_at_processes", look_or_fail)
    async with SGLangClient() as client:
        with tree(tmp_path) as process:
            seen = Seen(server(process.pid, URL_OF_NOBODY), client, QUICK)
            await seen.until(Health.HEALTHY)
            os.kill(seen.watch.pids()["scheduler"], signal.SIGSTOP)
            dead = await seen.until(Health.DEAD)
            await seen.end()
    assert (dead.cause, seen.watch.blind) == (Cause.SERVER_HANG, repr(error))


@pytest.mark.slow
def test_without_any_answer_yet_a_server_is_unknown(tmp_path):
    async def inside(pid):
        async with SGLangClient() as client:
            alone = ServerWatch(server(pid, URL_OF_NOBODY), QUICK, client)
            alone.look_at_server()
            return alone.verdict()

    with tree(tmp_path) as process:
        assert asyncio.run(inside(process.pid)).health is Health.UNKNOWN


def test_one_that_was_condemned_is_not_healthy_while_it_is_ended(tmp_path):
    """Its processes end one after the other, none of them stopped any more; what it made before proves nothing."""
    now = 0.0

    async def until(watch, health):
        nonlocal now
        async with asyncio.timeout(deadline_s()):
            while watch.verdict().health is not health:
                now += QUICK.look_interval_s
                watch.look_at_server()
                await asyncio.sleep(0.001)

    async def inside(process):
        async with SGLangClient() as client:
            alone = ServerWatch(server(process.pid, URL_OF_NOBODY), QUICK, client, clock=lambda: now)
            await until(alone, Health.HEALTHY)
            seen = alone.pids()
            for pid in seen.values():
                os.kill(pid, signal.SIGSTOP)
            await until(alone, Health.DEAD)
            os.kill(seen["scheduler"], signal.SIGKILL)
            os.kill(seen["detokenizer"], signal.SIGKILL)
            os.kill(seen["http"], signal.SIGCONT)
            while (left := alone._tree.look_at_processes()).keys() != {"http"} or left["http"].state == "T":
                pass
            alone.look_at_server()
            await asyncio.gather(alone._probe.close(), alone._metrics.close(), alone._health.close())
            return alone.verdict()

    with tree(tmp_path) as process:
        verdict = asyncio.run(inside(process))
    assert (verdict.health, verdict.reason) == (Health.UNKNOWN, "no token since it was found dead")


@pytest.mark.parametrize(("first_answer_s", "patience"), [(None, 1), (QUICK.silence_s / 2, 5)])
async def test_until_its_first_answer_a_server_has_the_patience_of_its_first_generation(
    tmp_path, monkeypatch, first_answer_s, patience
):
    """Of one that had just begun to serve, on a crowded machine, 3.1 s without a token passed for a hang."""
    monkeypatch.setattr(server_watch.ServerProcesses, "tokens", lambda self: 0)
    now, settings = 0.0, dataclasses.replace(QUICK, silence_factor=10.0)
    async with SGLangClient() as client:
        with tree(tmp_path) as process:
            alone = ServerWatch(
                server(process.pid, URL_OF_NOBODY), settings, client, first_answer_s=first_answer_s, clock=lambda: now
            )
            while alone.verdict().health is not Health.DEAD:
                now += QUICK.look_interval_s / 4
                alone.take_work(ServerWork(generation=0, waiting=8))
                alone.look_at_server()
                await asyncio.sleep(0.001)
            await asyncio.gather(alone._probe.close(), alone._metrics.close(), alone._health.close())
    assert patience * QUICK.silence_s <= now < (patience + 1) * QUICK.silence_s


# ── a part taken away: what it is there for goes wrong ──


@pytest.mark.slow
def test_without_the_count_of_tokens_a_busy_server_would_be_suspected(tmp_path, stand_in, monkeypatch):
    monkeypatch.setattr(server_watch.ServerProcesses, "tokens", lambda self: None)

    async def work(seen):
        await fault(stand_in, kind="slow", times=None, seconds=600)
        seen.watch.take_work(ServerWork(generation=0, waiting=8))
        return await seen.until(Health.SUSPECT)

    with tree(tmp_path) as process:
        watch(work, process.pid, stand_in)


async def test_a_probe_that_fails_by_a_defect_does_not_count_as_unanswered():
    """It had waited for ever, and a healthy server was ended for it."""

    class Broken:
        async def generate(self, *args, **more):
            raise KeyError("a defect")

    probe = GenerationProbe("http://127.0.0.1:9", Broken(), QUICK, time.monotonic)
    probe.send_if_due()
    assert probe.waits
    for _ in range(3):
        await asyncio.sleep(0)
    assert not probe.waits
    with pytest.raises(KeyError, match="a defect"):
        probe.send_if_due()
    await probe.close()
