"""The server's actor: what crosses the border, and that it answers whatever else is under way."""

import os
import signal
import socket
import time
from functools import partial

import pytest
import ray
from ray.exceptions import RayTaskError

from actors.processes.process_tree import descendants, identify, wait_ended
from actors.serving.server_report import ServerWork
from actors.serving.sglang_server import SGLangServer
from launcher.base.errors import ResourceError, ServerError
from launcher.base.messages import ServerState
from tests.programs.server_driver import PROMISE_S, STAND_IN, run_config
from tests.support.machine import scaled

pytestmark = pytest.mark.usefixtures("cluster")

deadline_s = partial(scaled, 120)
WORK, HOLD_S = ServerWork(generation=0), 5.0


@pytest.fixture
def make(tmp_path):
    made = []

    def make(*words, port=None, setup_timeout=60.0):
        config, paths = run_config(tmp_path)
        config.sglang.port = port
        config.rollout.setup_timeout = setup_timeout
        made.append(SGLangServer.remote(config, paths, 0, (*STAND_IN, *words)))
        return made[-1]

    yield make
    for actor in made:
        ray.kill(actor)


def get(ref):
    return ray.get(ref, timeout=deadline_s())


def start(server, **changes):
    return server.start.remote(**({"generation": 0, "model_path": "some/model", "weight_version": 1} | changes))


def test_a_life_through_the_actor(make):
    server = make()
    start(server)
    ready = get(server.wait_ready.remote())
    assert (ready.state, ready.weight_version) == (ServerState.READY, 1)
    os.kill(ready.pid, signal.SIGKILL)
    while (dead := get(server.report.remote(WORK, HOLD_S))).end is None:
        pass
    assert (dead.end.pid, dead.end.exit_code, dead.end.name) == (ready.pid, -9, "server-0")
    assert dead.info.state is ServerState.DEAD
    get(start(server, generation=1, weight_version=2))
    assert get(server.wait_ready.remote()).weight_version == 2
    assert get(server.stop.remote()).info.state is ServerState.STOPPED


def test_it_answers_while_a_start_hangs(make):
    server = make("--seconds-per-token", "1000")
    start(server)
    waiting = server.wait_ready.remote()
    give_up = time.monotonic() + deadline_s()
    while get(server.report.remote(WORK)).info.state is not ServerState.STALE:  # each turn is an answer
        assert time.monotonic() < give_up
    assert ray.wait([waiting], timeout=0)[0] == []
    get(server.stop.remote())
    with pytest.raises(RayTaskError) as caught:
        get(waiting)
    assert isinstance(caught.value.cause, ServerError)


def test_an_error_is_itself_on_the_other_side(make):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = make(port=taken.getsockname()[1])
        with pytest.raises(RayTaskError) as caught:
            get(start(server))
    assert isinstance(caught.value.cause, ResourceError)
    assert "sglang.port" in caught.value.cause.hint


@pytest.mark.parametrize("end", ["killed by Ray", "out of scope"])
def test_an_actor_that_ray_ends_takes_its_server_along(make, tmp_path, end):
    config, paths = run_config(tmp_path)
    server = SGLangServer.remote(config, paths, 0, tuple(STAND_IN))
    start(server)
    pid = get(server.wait_ready.remote()).pid
    tree = [identify(pid), *descendants(pid)]
    assert len(tree) > 1
    if end == "killed by Ray":
        ray.kill(server)
    del server
    assert wait_ended(tree, PROMISE_S)
