"""A server over two nodes, on stand-ins: both parts or none, and one end whichever part it was."""

import os
import shlex
import signal
import sys
from functools import partial

import psutil
import pytest
import ray

from actors.serving.server_worker_node import ServerWorkerNode
from actors.serving.sglang_server import SGLangServer
from launcher.base.messages import ServerState
from tests.programs.server_driver import run_config
from tests.support.machine import scaled

pytestmark = pytest.mark.usefixtures("cluster")

deadline_s = partial(scaled, 120)
PART = (sys.executable, "-m", "tests.programs.stand_in.part")


@pytest.fixture
def spanning(tmp_path):
    config, paths = run_config(tmp_path)
    config.sglang.tp_size = 2
    seat = ServerWorkerNode.remote(config, paths, 0, 1, PART)
    server = SGLangServer.remote(config, paths, 0, PART, (seat,))
    yield server, seat, paths.server_log(0).with_name("llm_server-0.1.log")
    ray.kill(server)
    ray.kill(seat)


def get(ref):
    return ray.get(ref, timeout=deadline_s())


def start(server, generation):
    get(server.start.remote(generation=generation, model_path="some/model", weight_version=1))
    return get(server.wait_ready.remote())


def parts(log):
    """The command of each life of the further part."""
    return [
        shlex.split(line.partition(": ")[2])
        for line in log.read_text().splitlines()
        if line.startswith("==== generation")
    ]


def value(words, name):
    return words[words.index(name) + 1]


def part_process(address):
    """The process of the further part that meets there."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []  # none of a zombie's, nor of one that has just ended
        if (
            words[1:3] == ["-m", "tests.programs.stand_in.part"]
            and address in words
            and value(words, "--node-rank") == "1"
        ):
            return process
    return None


def test_both_parts_live_and_end_together(spanning):
    server, seat, log = spanning
    assert start(server, 0).state is ServerState.READY
    (words,) = parts(log)
    address = value(words, "--dist-init-addr")
    assert (value(words, "--nnodes"), value(words, "--node-rank"), value(words, "--tp-size")) == ("2", "1", "2")
    assert value(words, "--host") == "127.0.0.1"
    assert "--enable-metrics" not in words, "its port knows no keys"

    waiting = server.wait_exit.remote()
    part_process(address).send_signal(signal.SIGKILL)
    ended = get(waiting)
    assert ended.reason.startswith("server-0.1 ended: ")
    assert get(server.info.remote()).state is ServerState.DEAD
    assert not psutil.pid_exists(ended.pid)

    again = start(server, 1)
    assert (again.state, again.generation) == (ServerState.READY, 1)
    assert len(parts(log)) == 2
    address = value(parts(log)[1], "--dist-init-addr")
    theirs = seat.wait_exit.remote()
    os.kill(again.pid, signal.SIGKILL)
    get(theirs)
    assert get(server.wait_exit.remote()).exit_code == -9
    assert part_process(address) is None


def test_a_part_whose_actor_dies_is_the_servers_end(spanning):
    server, seat, _ = spanning
    start(server, 0)
    waiting = server.wait_exit.remote()
    ray.kill(seat)
    assert get(waiting).reason.startswith("server-0.1 is gone with its actor or its node")
    assert get(server.info.remote()).state is ServerState.DEAD


def test_stopping_it_stops_every_part(spanning):
    server, seat, log = spanning
    start(server, 0)
    theirs = seat.wait_exit.remote()
    assert get(server.stop.remote()).state is ServerState.STOPPED
    get(theirs)
    assert part_process(value(parts(log)[0], "--dist-init-addr")) is None
