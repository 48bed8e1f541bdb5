"""actor.weight_update_mode=xccl with the real SGLang on the CPU: whole, stopped and killed in a broadcast, again."""

import asyncio
import os
import signal
import time

import pytest

from actors.processes.process_tree import descendants, identify, name
from actors.serving.weight_buckets import in_buckets
from actors.weights.group_transport import GroupTransport
from launcher.base.errors import RequestFailed, ServerError
from launcher.base.messages import ServerState
from tests.support.machine import scaled
from tests.support.real_server import Serving, assert_serves, changed_weights, deadline_s

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def serving(tmp_path):
    serving = Serving(tmp_path)
    serving.start()
    yield serving
    serving.run(lambda _: serving.server.close())
    serving.loop.close()


def scheduler(server):
    tree = [identify(server.pid), *descendants(server.pid)]
    return next(process.pid for process in tree if name(process).startswith("sglang::sched"))


def test_weights_over_a_group_survive_a_stop_and_a_kill_of_their_server(serving):
    sender = None

    def send(factor, version, *, within_s=None):
        within_s = within_s or deadline_s()

        async def work(client):
            nonlocal sender
            sender = sender or GroupTransport(client, tuple, device="cpu", tp_size=1, timeout_s=within_s)
            sender._client = client
            sender._timeout_s = within_s
            await sender.send(serving.server.info(), in_buckets(changed_weights(factor).items(), device="cpu"), version)

        serving.run(work)

    def send_until_taken(factor, version):
        """The server first ends what it was asked before."""
        give_up_at = time.monotonic() + deadline_s()
        while True:
            try:
                return send(factor, version)
            except ServerError:
                assert time.monotonic() < give_up_at

    send(0.5, 4)
    send(0.7, 5)
    assert_serves(serving, changed_weights(0.7), 5)
    assert serving.log.read_text().count("init custom process group") == 1

    stopped = scheduler(serving.server.info())
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(RequestFailed) as caught:
        send(0.6, 6, within_s=scaled(2.0))
    os.kill(stopped, signal.SIGCONT)
    assert caught.value.kind == "timeout"
    send_until_taken(0.8, 7)
    assert_serves(serving, changed_weights(0.8), 7)

    doomed = scheduler(serving.server.info())
    os.kill(doomed, signal.SIGSTOP)  # so that it surely has not taken them when it is killed

    async def killed(client):
        sender._client = client
        sender._timeout_s = deadline_s()
        buckets = in_buckets(changed_weights(0.9).items(), device="cpu")
        update = asyncio.create_task(sender.send(serving.server.info(), buckets, 8))
        await asyncio.sleep(0.2)
        os.kill(doomed, signal.SIGKILL)
        with pytest.raises(ServerError):
            await update
        await serving.server.wait_exit()

    serving.run(killed)
    assert serving.server.info().state is ServerState.DEAD
    serving.version = 0
    serving.start(generation=1)
    send(0.9, 8)
    assert_serves(serving, changed_weights(0.9), 8)
