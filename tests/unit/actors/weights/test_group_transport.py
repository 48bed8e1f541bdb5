"""Weights over a real gloo group with each server: who takes part, who breaks off, who hangs, and what comes after."""

import asyncio
import contextlib
import hashlib
import os
import signal
from collections import Counter
from functools import partial

import aiohttp
import psutil
import pytest
import torch

from actors.serving.sglang_client import SGLangClient
from actors.serving.weight_buckets import in_buckets
from actors.weights.group_transport import GroupTransport
from actors.weights.weight_folders import FolderTransport, WeightFolders
from actors.weights.weight_publisher import WeightPublisher
from actors.weights.weight_transports import FallbackTransport
from launcher.base.errors import RequestFailed, ServerError
from launcher.base.messages import ServerState
from tests.programs import stand_in_server
from tests.support.machine import scaled
from tests.support.ready_servers import pool_of, ready
from tests.support.worlds.rollout import fault

pytestmark = pytest.mark.slow

deadline_s = partial(scaled, 60.0)
LARGE = {"w": torch.arange(20_000_000, dtype=torch.int32)}
"""More than sockets hold: a broadcast of it waits for who takes it."""
SMALL = {"a": torch.arange(6, dtype=torch.bfloat16).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
INIT, UPDATE = "/init_weights_update_group", "/update_weights_from_distributed"


def digest(weights):
    return hashlib.sha256(
        b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in weights.values())
    ).hexdigest()


@contextlib.asynccontextmanager
async def sending():
    async with SGLangClient() as client:
        sender = GroupTransport(client, SMALL.items, device="cpu", tp_size=1, timeout_s=deadline_s())
        yield client, sender
        sender.keep(())


def listening():
    """Addresses on which this process listens, each as often as it does."""
    mine = psutil.Process().net_connections("tcp")
    return Counter(one.laddr.ip for one in mine if one.status == psutil.CONN_LISTEN)


async def test_a_server_on_another_node_comes_to_this_nodes_address_where_alone_is_listened():
    """127.0.0.2 and 127.0.0.3 are two nodes here: nobody who binds one is reached by the other."""
    with stand_in_server.running("--host", "127.0.0.3", "--weight-version", "0") as named:
        url = named.replace("127.0.0.1", "127.0.0.3")
        async with SGLangClient() as client:
            sender = GroupTransport(
                client, SMALL.items, device="cpu", tp_size=1, timeout_s=deadline_s(), address="127.0.0.2"
            )
            orders, join, before, during = [], client.join_update_group, listening(), Counter()

            async def noted(url, **order):
                orders.append(order)
                during.update(listening() - before)
                await join(url, **order)

            client.join_update_group = noted
            await sender.send(ready(url), in_buckets(SMALL.items(), device="cpu"), 1)
            after = listening() - before
            assert (await told(url, "received"))[-1] == [["a", "b"], digest(SMALL)]
            sender.keep(())
    (order,) = orders
    assert order["address"] == "127.0.0.2"
    assert set(during) == {"127.0.0.2"}, "the store, and gloo as soon as it is there"
    assert set(after) <= {"127.0.0.2"}


async def told(url, what):
    async with aiohttp.ClientSession() as session, session.get(f"{url}/stand_in/{what}") as answer:
        return await answer.json()


async def test_each_version_arrives_whole_over_a_group_that_is_formed_once(servers):
    async with sending() as (client, sender):
        for version in (1, 2, 3):
            weights = {name: tensor * version for name, tensor in SMALL.items()}
            for index, url in enumerate(servers):
                await sender.send(ready(url, index), in_buckets(weights.items(), device="cpu"), version)
                assert (await client.model_info(url, timeout_s=deadline_s())).weight_version == version
                assert (await told(url, "received"))[-1] == [["a", "b"], digest(weights)]
        assert [(await told(url, "state"))["asked"][INIT] for url in servers] == [1, 1]


async def test_until_its_last_bucket_a_server_has_no_version(servers):
    buckets = in_buckets(SMALL.items(), device="cpu", most_bytes=1)
    assert [bucket.names for bucket in buckets] == [("a",), ("b",)]
    async with sending() as (client, sender):
        await fault(servers[0], {"kind": "500", "path": UPDATE, "times": 1})
        with pytest.raises(ServerError, match="500"):
            await sender.send(ready(servers[0]), buckets, 1)
        await sender.send(ready(servers[0]), buckets[:1], 1)
        first, second = ready(servers[0]), ready(servers[0], generation=1)  # another incarnation has a group of its own
        orders = []
        update = client.update_weights_from_distributed

        async def noted(url, **order):
            await update(url, **order)
            orders.append((order["weight_version"], (await client.model_info(url, timeout_s=9)).weight_version))

        client.update_weights_from_distributed = noted
        await sender.send(first, buckets, 2)
        await sender.send(second, buckets, 3)
        assert orders == [(None, None), (2, 2), (None, None), (3, 3)]
        assert (await told(servers[0], "state"))["asked"][INIT] == 3


async def test_of_two_updates_at_once_the_second_waits(servers):
    """A broadcast does not say which update it is of."""
    async with sending() as (client, sender):
        both = [{"w": LARGE["w"] + version} for version in (1, 2)]
        await asyncio.gather(
            *(sender.send(ready(servers[0]), in_buckets(one.items(), device="cpu"), v) for v, one in enumerate(both, 1))
        )
        assert await told(servers[0], "received") == [[["w"], digest(one)] for one in both]
        assert (await client.model_info(servers[0], timeout_s=deadline_s())).weight_version == 2


async def test_a_server_that_is_killed_within_a_broadcast_ends_it_and_its_next_life_joins_anew(servers):
    with stand_in_server.running("--weight-version", "0") as doomed:
        async with sending() as (_, sender):
            await sender.send(ready(doomed), in_buckets(SMALL.items(), device="cpu"), 1)
            await fault(doomed, {"kind": "slow", "path": UPDATE, "times": 1, "seconds": 10_000})  # never takes part
            update = asyncio.ensure_future(sender.send(ready(doomed), in_buckets(LARGE.items(), device="cpu"), 2))
            await asked(doomed, UPDATE, 2)
            os.kill(pid_at(doomed), signal.SIGKILL)
            async with asyncio.timeout(deadline_s() / 2):
                with pytest.raises(ServerError):
                    await update
            await sender.send(ready(servers[0], generation=1), in_buckets(SMALL.items(), device="cpu"), 2)
            assert (await told(servers[0], "received"))[-1] == [["a", "b"], digest(SMALL)]


async def asked(url, path, times):
    async with asyncio.timeout(deadline_s()):
        while (await told(url, "state"))["asked"].get(path, 0) < times:
            await asyncio.sleep(0.01)


def pid_at(url):
    port = int(url.rpartition(":")[2])
    return next(
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    )


@contextlib.contextmanager
def stopped(url):
    pid = pid_at(url)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_a_hung_server_costs_its_own_deadline_and_nobody_else_waits(servers):
    async with sending() as (_, sender):
        hung, well = ready(servers[0]), ready(servers[1], 1)
        for server in (hung, well):  # which imports torch first
            await sender.send(server, in_buckets(SMALL.items(), device="cpu"), 1)
        sender._timeout_s = 3
        with stopped(servers[0]):
            update = asyncio.ensure_future(sender.send(hung, in_buckets(LARGE.items(), device="cpu"), 2))
            await asyncio.sleep(0)
            await sender.send(well, in_buckets(SMALL.items(), device="cpu"), 2)
            assert not update.done()
            with pytest.raises(RequestFailed) as caught:
                await update
            assert caught.value.kind == "timeout"
            with pytest.raises(RequestFailed):  # nor does it join another
                await sender.send(hung, in_buckets(SMALL.items(), device="cpu"), 2)
        async with asyncio.timeout(deadline_s()):
            while True:  # it first has to end what it was asked while it was stopped
                with contextlib.suppress(ServerError):
                    await sender.send(hung, in_buckets(SMALL.items(), device="cpu"), 3)
                    break
        assert (await told(servers[0], "received"))[-1] == [["a", "b"], digest(SMALL)]


async def test_files_take_the_place_of_a_group_that_fails_twice(servers, tmp_path):
    reasons = []

    def files(reason):
        reasons.append(reason)
        folders = WeightFolders(tmp_path / "w", lambda folder: (folder / "config.json").write_text("{}"))
        return FolderTransport(client, folders, timeout_s=deadline_s())

    async with sending() as (client, sender):
        pool = await pool_of(servers[:1])
        transport = FallbackTransport(sender, files, what="weights over its group", is_living=pool.is_living)
        publisher = WeightPublisher(pool, transport)
        await fault(servers[0], {"kind": "500", "path": INIT, "times": 2})
        await publisher.publish(1)
        (server,) = pool.servers()
        assert (server.state, server.weight_version) == (ServerState.READY, 1)
        (reason,) = reasons
        assert "server-0 failed to take weights over its group" in reason
        assert (await told(servers[0], "state"))["asked"]["/update_weights_from_disk"] == 1
