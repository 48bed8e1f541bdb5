"""The monitor's actor beside a real server's: after a SIGKILL it adopts the server as it is."""

import os
import signal
import time
from functools import partial

import pytest
import ray
from ray.exceptions import RayActorError

from actors.monitoring.health_monitor_actor import HealthMonitorActor
from actors.monitoring.monitor_view import Watched
from actors.processes.process_tree import identify
from actors.serving.sglang_server import SGLangServer
from launcher.base.messages import Cause, Health, ServerState
from tests.programs.server_driver import STAND_IN, run_config
from tests.support.machine import scaled
from tests.support.worlds.health_monitor import batch

pytestmark = pytest.mark.usefixtures("cluster")

deadline_s = partial(scaled, 120)


def until(monitor, info, health):
    """The first view in which the server is so; a call that fails because its actor restarts is made again."""
    deadline = time.monotonic() + deadline_s()
    while time.monotonic() < deadline:
        try:
            view = ray.get(monitor.watch.remote([Watched(server=info)]), timeout=deadline_s())
        except RayActorError:
            continue
        if view.servers[0].verdict.health is health:
            return view
    raise AssertionError(f"not {health} in time")


@pytest.fixture
def actors(tmp_path):
    config, paths = run_config(tmp_path)
    config.actor.dtype = "float32"
    always = {"max_restarts": -1, "max_task_retries": 0}
    server = SGLangServer.options(**always).remote(config, paths, 0, STAND_IN)
    monitor = HealthMonitorActor.options(**always).remote(config, paths, 1)
    server.start.remote(generation=0, model_path="some/model", weight_version=0)
    yield server, monitor, ray.get(server.wait_ready.remote(), timeout=deadline_s())
    for actor in (server, monitor):
        ray.kill(actor)


def test_m1_killed_it_comes_back_adopts_the_server_and_answers_at_the_gate(actors):
    _, monitor, info = actors
    until(monitor, info, Health.HEALTHY)
    assert ray.get(monitor.admit.remote(batch(0)), timeout=deadline_s()).admitted
    life = identify(info.pid)
    pid = ray.get(monitor.__ray_call__.remote(lambda _: os.getpid()), timeout=deadline_s())
    os.kill(pid, signal.SIGKILL)
    view = until(monitor, info, Health.HEALTHY)
    assert pid != ray.get(monitor.__ray_call__.remote(lambda _: os.getpid()), timeout=deadline_s())
    assert [(s.name, s.generation) for s in view.servers] == [("server-0", 0)]
    assert identify(info.pid) == life
    assert not ray.get(monitor.admit.remote(batch(0, empty=1)), timeout=deadline_s()).admitted


def test_a_stopped_server_is_condemned_though_its_own_actor_says_ready(actors):
    server, monitor, info = actors
    until(monitor, info, Health.HEALTHY)
    os.kill(info.pid, signal.SIGSTOP)
    view = until(monitor, info, Health.DEAD)
    assert view.servers[0].verdict.cause is Cause.SERVER_HANG
    assert ray.get(server.info.remote(), timeout=deadline_s()).state is ServerState.READY
