"""The monitor's actor beside a real server's: after a SIGKILL it adopts the server as it is."""

import os
import signal
import time
from functools import partial

import pytest
import ray
from ray.exceptions import RayActorError

from actors.monitoring.health_monitor import HealthMonitorActor
from actors.processes.process_tree import identify
from actors.serving.server_report import ServerWork
from actors.serving.sglang_server import SGLangServer
from launcher.base.messages import Cause, Health, ServerState
from tests.programs.server_driver import STAND_IN, run_config
from tests.support.machine import scaled
from tests.support.worlds.health_monitor import batch

pytestmark = pytest.mark.usefixtures("cluster")

deadline_s = partial(scaled, 120)


def until(monitor, health):
    """The first report in which the server is so; a call that fails because its actor restarts is made again."""
    deadline = time.monotonic() + deadline_s()
    while time.monotonic() < deadline:
        try:
            seen = ray.get(monitor.watch.remote({"server-0": ServerWork(generation=0)}, 0.5), timeout=deadline_s())
        except RayActorError:
            continue
        one = seen.servers.get("server-0")
        if one is not None and one.verdict is not None and one.verdict.health is health:
            return one
    raise AssertionError(f"not {health} in time")


@pytest.fixture
def actors(tmp_path):
    config, paths = run_config(tmp_path)
    config.actor.dtype = "float32"
    always = {"max_restarts": -1, "max_task_retries": 0}
    server = SGLangServer.options(name="server-0", **always).remote(config, paths, 0, STAND_IN)
    monitor = HealthMonitorActor.options(**always).remote(config, paths, 1)
    server.start.remote(generation=0, model_path="some/model", weight_version=0)
    yield server, monitor, ray.get(server.wait_ready.remote(), timeout=deadline_s())
    for actor in (server, monitor):
        ray.kill(actor)


def test_m1_killed_it_comes_back_adopts_the_server_and_answers_at_the_gate(actors):
    _, monitor, info = actors
    until(monitor, Health.HEALTHY)
    assert ray.get(monitor.admit.remote(batch(0)), timeout=deadline_s()).admitted
    life = identify(info.pid)
    pid = ray.get(monitor.__ray_call__.remote(lambda _: os.getpid()), timeout=deadline_s())
    os.kill(pid, signal.SIGKILL)
    seen = until(monitor, Health.HEALTHY)
    assert pid != ray.get(monitor.__ray_call__.remote(lambda _: os.getpid()), timeout=deadline_s())
    assert seen.info == info
    assert identify(info.pid) == life
    assert not ray.get(monitor.admit.remote(batch(0, empty=1)), timeout=deadline_s()).admitted


def test_a_stopped_server_is_condemned_by_its_own_actor_which_calls_it_ready(actors):
    _, monitor, info = actors
    until(monitor, Health.HEALTHY)
    os.kill(info.pid, signal.SIGSTOP)
    seen = until(monitor, Health.DEAD)
    assert (seen.verdict.cause, seen.info.state) == (Cause.SERVER_HANG, ServerState.READY)


def test_a_servers_actor_that_is_stopped_makes_its_server_unknown_and_costs_it_nothing(actors):
    server, monitor, info = actors
    until(monitor, Health.HEALTHY)
    pid = ray.get(server.__ray_call__.remote(lambda _: os.getpid()), timeout=deadline_s())
    os.kill(pid, signal.SIGSTOP)
    try:
        seen = until(monitor, Health.UNKNOWN)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert seen.silent_s > 0
    assert until(monitor, Health.HEALTHY).info == info


def test_a_servers_actor_that_is_killed_takes_its_server_along_and_says_so_when_it_is_back(actors):
    server, monitor, info = actors
    until(monitor, Health.HEALTHY)
    life = identify(info.pid)
    os.kill(ray.get(server.__ray_call__.remote(lambda _: os.getpid()), timeout=deadline_s()), signal.SIGKILL)
    deadline = time.monotonic() + deadline_s()
    work = {"server-0": ServerWork(generation=0)}
    while ray.get(monitor.watch.remote(work, 0.5), timeout=deadline_s()).servers["server-0"].info.generation != -1:
        assert time.monotonic() < deadline
    assert identify(info.pid) != life
