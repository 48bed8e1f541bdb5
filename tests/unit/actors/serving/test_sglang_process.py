"""A server's lives, with the stand-in as the command: real processes in a real host."""

import asyncio
import os
import signal
import socket
import sys
from dataclasses import replace

import aiohttp
import pytest

from actors.cluster.server_gpus import ServerGpus
from actors.processes.process_tree import descendants, identify
from actors.serving import sglang_server
from actors.serving.server_report import ServerWork
from actors.serving.sglang_server import SGLangServer
from launcher.base.errors import ResourceError, ServerError
from launcher.base.messages import Cause, Health, ServerExit, ServerState
from launcher.config.schema import RunConfig
from launcher.policy.exit_cause import find_server_cause
from launcher.resources import hardware
from tests.support.worlds.server_watch import QUICK
from tests.support.worlds.serving import deadline_s, running, start
from tests.support.worlds.serving import make as make


async def post(url, body):
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        response.raise_for_status()


def is_free(url):
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind(("127.0.0.1", int(url.rpartition(":")[2])))
        return True


@pytest.mark.slow
async def test_a_life_from_start_to_stop(make, tmp_path):
    server = make("--tree")
    assert server.info().state is ServerState.STOPPED
    async with running(server):
        starting = await start(server)
        assert (starting.state, starting.weight_version) == (ServerState.STARTING, None)
        ready, again = await asyncio.gather(server.wait_ready(), server.wait_ready())
        assert ready == again == server.info()
        assert (ready.state, ready.weight_version, ready.generation, ready.pid) == (
            ServerState.READY,
            3,
            0,
            starting.pid,
        )
        tree = [identify(ready.pid), *descendants(ready.pid)]
        stopped = await server.stop()
        exit_ = stopped.end
        assert stopped.info == server.info()
        assert (stopped.info.state, stopped.verdict) == (ServerState.STOPPED, None)
        assert [process for process in tree if identify(process.pid) == process] == []
        assert is_free(ready.url)
        assert (exit_.name, exit_.generation, exit_.pid, exit_.exit_code) == ("server-0", 0, ready.pid, -9)
        assert "told to stop" in exit_.reason
        assert exit_.was_told
        assert (await server.stop()).info == stopped.info
    log = (tmp_path / "llm_server-0.log").read_text()
    assert log.startswith("==== generation 0, ")
    assert "--model-path some/model --weight-version 3" in log.splitlines()[0]


@pytest.mark.slow
async def test_a_death_is_told_and_a_next_life_can_begin(make, tmp_path):
    server = make()
    async with running(server):
        await start(server)
        first = await server.wait_ready()
        waiting = [asyncio.create_task(server.wait_exit()) for _ in range(2)]
        os.kill(first.pid, signal.SIGKILL)
        exit_, same = await asyncio.gather(*waiting)
        assert exit_ == same == await server.wait_exit()
        assert (exit_.pid, exit_.exit_code) == (first.pid, -9)
        assert exit_.reason == "its process ended with exit code -9 (SIGKILL)"
        assert (server.info().state, server.info().reason) == (ServerState.DEAD, exit_.reason)
        await start(server, generation=1, weight_version=8)
        second = await server.wait_ready()
        assert (second.generation, second.weight_version, second.state) == (1, 8, ServerState.READY)
        assert second.pid != first.pid
    log = (tmp_path / "llm_server-0.log").read_text()
    assert log.index("==== generation 0") < log.index("==== generation 1"), (
        "a life must not overwrite an earlier one's log"
    )


async def test_a_fault_of_a_gpu_is_told_with_the_gpu(make, tmp_path):
    server = make(gpu_ids=("3",))
    async with running(server):
        await start(server)
        ready = await server.wait_ready()
        with (tmp_path / "llm_server-0.log").open("a") as log:
            log.write("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\n")
        os.kill(ready.pid, signal.SIGABRT)
        exit_ = await server.wait_exit()
        assert " on GPU 3 of node n0de0123: torch.AcceleratorError: CUDA error: uncorrectable ECC" in exit_.reason
        assert find_server_cause(exit_.reason.split(" | "), exit_.exit_code).cause is Cause.GPU_FAULT


@pytest.mark.slow
async def test_a_death_is_told_also_where_the_log_can_not_be_read(make, tmp_path):
    """Its actor went on calling it READY: whoever waited for its end heard of the disk instead."""
    server = make()
    async with running(server):
        await start(server)
        ready = await server.wait_ready()
        log = tmp_path / "llm_server-0.log"
        log.rename(tmp_path / "elsewhere")
        log.mkdir()
        os.kill(ready.pid, signal.SIGKILL)
        assert (await server.wait_exit()).exit_code == -9
        assert server.info().state is ServerState.DEAD


@pytest.mark.slow
async def test_a_second_life_beside_a_living_one_is_refused(make):
    server = make()
    async with running(server):
        await start(server)
        await server.wait_ready()
        with pytest.raises(ServerError, match="can't start generation 1: generation 0 is READY"):
            await start(server, generation=1)
        assert server.info().state is ServerState.READY


@pytest.mark.slow
async def test_an_early_end_says_the_exit_code_and_the_logs_decisive_line(make):
    server = make("--die-at-start")
    async with running(server):
        await start(server)
        with pytest.raises(ServerError) as caught:
            await server.wait_ready()
        error = caught.value
    assert "server-0 (generation 0) did not become ready: it, or a part of it, ended with exit code 9" in error.message
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB" in error.message
    assert "llm_server-0.log" in error.hint


@pytest.mark.slow
async def test_a_failed_start_is_told_to_whoever_asks_and_stays_told(make):
    server = make("--die-at-start")
    async with running(server):
        await start(server)
        for _ in range(2):
            with pytest.raises(ServerError, match="exit code 9"):
                await server.wait_ready()
        assert server.info().state is ServerState.FAILED
        assert (await server.wait_exit()).exit_code == 9


@pytest.mark.slow
async def test_a_server_that_never_generates_is_ended_at_its_deadline(make):
    """Its HTTP side answers, as SGLang's does with a stopped scheduler."""
    server = make("--seconds-per-token", "1000", setup_timeout_s=3.0)
    async with running(server):
        await start(server)
        with pytest.raises(ServerError, match=r"did not become ready: no generation within 3 s") as caught:
            await server.wait_ready()
        assert "rollout.setup_timeout=3" in caught.value.hint
        assert server.info().state is ServerState.FAILED
        assert identify(server.info().pid) is None
        assert not (await server.wait_exit()).was_told, "nobody ordered it"


@pytest.mark.slow
async def test_a_server_with_other_weights_than_asked_for_is_not_ready(make):
    """The last --weight-version wins, as a server's own default would."""
    wrapper = (
        "import sys; sys.argv += ['--weight-version', '2']; from tests.programs.stand_in_server import main; main()"
    )
    server = make(entry=(sys.executable, "-c", wrapper))
    async with running(server):
        await start(server, weight_version=3)
        with pytest.raises(ServerError, match="generates with weight version 2, not 3"):
            await server.wait_ready()


async def test_a_port_in_use_is_an_error_before_anything_is_started(make, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = make(port=taken.getsockname()[1])
        async with running(server):
            for ask in (lambda: start(server), server.wait_ready):
                with pytest.raises(
                    ResourceError, match=rf"can't listen on 127\.0\.0\.1:{taken.getsockname()[1]}"
                ) as caught:
                    await ask()
                assert "sglang.port" in caught.value.hint
            assert server.info().state is ServerState.FAILED
    assert not (tmp_path / "llm_server-0.log").exists()


@pytest.mark.slow
async def test_stopping_while_it_starts(make):
    server = make("--seconds-per-token", "1000")
    async with running(server):
        await start(server)
        waiting = asyncio.create_task(server.wait_ready())
        await server.stop()
        with pytest.raises(ServerError, match="it was stopped"):
            await waiting
        assert server.info().state is ServerState.STOPPED
        await start(server, generation=1)
        assert server.info().generation == 1


@pytest.mark.slow
async def test_who_asks_before_the_start_waits_for_it(make):
    """Ray delivers calls to an async actor in any order."""
    server = make()
    async with running(server):
        ready, exit_ = asyncio.create_task(server.wait_ready()), asyncio.create_task(server.wait_exit())
        await asyncio.sleep(0)
        await start(server)
        assert (await ready).state is ServerState.READY
        await server.stop()
        assert (await exit_).pid == (await ready).pid


@pytest.mark.slow
async def test_a_stop_that_returns_late_leaves_the_next_incarnation_alone(make):
    server = make()
    async with running(server):
        await start(server)
        await server.wait_ready()
        first = await asyncio.shield(server._launch)
        end, ended, may_return = first.end, asyncio.Event(), asyncio.Event()

        async def end_late():
            await end()
            ended.set()
            await may_return.wait()

        first.end = end_late
        stopping = asyncio.create_task(server.stop())
        await ended.wait()
        await server.wait_exit()
        first.end = end
        while server.info().state is not ServerState.STOPPED:
            await asyncio.sleep(0)
        await start(server, generation=1)
        ready = await server.wait_ready()
        may_return.set()
        await stopping
        assert (server.info(), identify(ready.pid) is None) == (ready, False)


# ── its reports ──

WORK = ServerWork(generation=0)


async def reported(server, holds):
    """Each report is one that was held until something changed."""
    while not holds(report := await server.report(WORK, deadline_s())):
        pass
    return report


async def test_it_reports_its_state_its_verdict_and_its_end_as_they_change(make):
    server = make()
    async with running(server):
        await start(server)
        starting = await server.report(WORK)
        ready = await reported(server, lambda seen: seen.info.state is ServerState.READY)
        healthy = await reported(server, lambda seen: seen.verdict and seen.verdict.health is Health.HEALTHY)
        os.kill(ready.info.pid, signal.SIGKILL)
        dead = await reported(server, lambda seen: seen.end is not None)
        later = await server.report(WORK)
    assert (starting.verdict, starting.end, healthy.info) == (None, None, ready.info)
    assert (dead.info.state, dead.verdict.health, dead.verdict.cause) == (
        ServerState.DEAD,
        Health.DEAD,
        Cause.SERVER_CRASH,
    )
    assert (dead.end.exit_code, dead.end.was_told, dead.ordered) == (-9, False, 0)
    assert replace(later.end, age_s=dead.end.age_s) == dead.end
    assert later.end.age_s > dead.end.age_s >= 0


async def test_a_stopped_server_is_condemned_by_its_own_actor_and_one_that_is_told_to_stop_is_not_judged(make):
    server = make(health=QUICK)
    async with running(server):
        await start(server)
        ready = await server.wait_ready()
        await reported(server, lambda seen: seen.verdict and seen.verdict.health is Health.HEALTHY)
        os.kill(ready.pid, signal.SIGSTOP)
        hung = await reported(server, lambda seen: seen.verdict.health is Health.DEAD)
        stopped = await server.stop()
    assert (hung.info.state, hung.verdict.cause) == (ServerState.READY, Cause.SERVER_HANG)
    assert (stopped.verdict, stopped.end.was_told) == (None, True)


async def test_a_held_report_is_given_at_once_where_another_one_asks(make):
    server = make()
    await server.report(WORK, 0.001)
    held = asyncio.create_task(server.report(WORK, 1000.0))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not held.done()
    now = await server.report(WORK)
    async with asyncio.timeout(deadline_s()):
        assert await held == now


async def test_an_end_is_told_with_what_its_machine_knows_of_it(make):
    async def explain(end):
        return replace(end, reason=f"{end.reason} | NVML reports Xid 95 of GPU 2", oom_kills=3)

    server = make(explain=explain)
    async with running(server):
        await start(server)
        ready = await server.wait_ready()
        os.kill(ready.pid, signal.SIGKILL)
        dead = await reported(server, lambda seen: seen.end is not None)
    assert (dead.end.oom_kills, dead.verdict.cause) == (3, Cause.GPU_FAULT)


async def test_a_kill_for_memory_of_the_incarnation_before_does_not_explain_the_end_of_the_next(monkeypatch):
    """While one starts nobody asks for reports, by which the count is kept up to date."""
    kills = [0]
    monkeypatch.setattr(hardware, "oom_kills", lambda pid=None: ("vmstat", kills[0]))
    monkeypatch.setattr(hardware, "oom_kills_in", lambda file: kills[0])
    monkeypatch.setattr(sglang_server, "listening_address", lambda host: host)

    class Process:
        def configure(self, config):
            self.config = config

        async def start(self, **order):
            return None

    actor = object.__new__(SGLangServer.__ray_metadata__.modified_class)
    actor._config = RunConfig(experiment_name="kills")
    actor._process = Process()
    actor._gpus = ServerGpus(())
    actor._kills = hardware.OomKillWatch()
    end = ServerExit(name="server-0", generation=0, pid=7, exit_code=-9, reason="killed", age_s=0.0)
    kills[0] = 1
    first = await actor._explain(end)
    await actor.start(generation=1, model_path="some/model", weight_version=0)
    assert (first.oom_kills, (await actor._explain(end)).oom_kills) == (1, 0)


async def test_a_kill_for_memory_is_known_though_reports_are_asked_while_nvml_explains_it(monkeypatch):
    """Two further looks forgot it, and the memory ladder took no step down."""
    kills = [0]
    monkeypatch.setattr(hardware, "oom_kills", lambda pid=None: ("vmstat", kills[0]))
    monkeypatch.setattr(hardware, "oom_kills_in", lambda file: kills[0])

    class Gpus:
        async def explained(self, end):
            for _ in range(2):
                actor._kills.note_count()
            return end

    actor = object.__new__(SGLangServer.__ray_metadata__.modified_class)
    actor._gpus = Gpus()
    actor._kills = hardware.OomKillWatch()
    actor._kills.note_count()
    kills[0] = 1
    end = ServerExit(name="server-0", generation=0, pid=7, exit_code=-9, reason="killed", age_s=0.0)
    assert (await actor._explain(end)).oom_kills == 1
