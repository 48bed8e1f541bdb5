"""Tensors on their way to the servers take memory as long as a server loads them, and no longer."""

import asyncio
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from actors.serving.weight_buckets import in_buckets
from actors.weights.weight_publisher import WeightPublisher
from launcher.base.errors import WeightsRefused
from launcher.base.messages import ServerState
from tests.support.machine import scaled
from tests.support.ready_servers import pool_of

SIZE, N_TENSORS = 1024, 10


class Weights:
    """Makes each tensor when it is asked for, in bfloat16, and counts the bytes of those that are still held."""

    def __init__(self):
        self.held = self.most = 0

    def __call__(self):
        for index in range(N_TENSORS):
            tensor = torch.zeros(SIZE // 2, dtype=torch.bfloat16)
            self.held += tensor.nbytes
            self.most = max(self.most, self.held)
            weakref.finalize(tensor, self._gone, tensor.nbytes)
            yield f"w{index}", tensor
            del tensor

    def _gone(self, size):
        self.held -= size


class Client:
    """Takes what it is sent, once `may_take` is set."""

    def __init__(self):
        self.asked, self.may_take = asyncio.Event(), asyncio.Event()

    async def update_weights_from_tensor(self, url, *, named_tensors, **how):
        assert len(named_tensors) == N_TENSORS
        self.asked.set()
        await self.may_take.wait()


async def given_up(is_held):
    """The thread that made them may still be letting go."""
    async with asyncio.timeout(scaled(20.0)):
        while is_held():
            await asyncio.sleep(0.001)


async def publisher_to(n_servers, client, weights, *, groups=None):
    pool = await pool_of([f"http://{index}" for index in range(n_servers)])
    made = WeightPublisher(
        client, pool, folders=None, weights=weights, tp_size=1, timeout_s=5, groups=groups, finish_s=None
    )
    return pool, made


def test_of_buckets_one_is_held_twice_at_a_time():
    weights = Weights()
    buckets = in_buckets(weights(), device="cpu", most_bytes=2 * SIZE)
    assert sum(bucket.flat.nbytes for bucket in buckets) == N_TENSORS * SIZE
    assert len(buckets) == N_TENSORS // 2
    assert weights.most == 3 * SIZE, "two of a bucket, and the next one's first, which didn't fit"
    assert weights.held == 0


async def test_nothing_is_held_until_the_next_version():
    """Beside the gradients of each step one version was held, and two while the next one was made."""
    client, weights = Client(), Weights()
    client.may_take.set()
    _, publisher = await publisher_to(2, client, weights)
    for version in (1, 2, 3):
        await publisher.publish(version)
        assert publisher.version == version
        await given_up(lambda: weights.held)
    assert weights.most == N_TENSORS * SIZE


async def test_what_a_late_server_loads_is_held_for_it(monkeypatch):
    monkeypatch.setattr("actors.weights.weight_publisher.PATIENCE_S", 0.0)
    client, weights = Client(), Weights()
    late = asyncio.Event()

    async def update(url, *, named_tensors, weight_version, **how):
        if url == "http://0" and weight_version == 1:
            await late.wait()
        seen.append((url, weight_version, len(named_tensors)))

    seen = []
    client.update_weights_from_tensor = update
    pool, publisher = await publisher_to(2, client, weights)
    await publisher.publish(1)
    assert weights.held == N_TENSORS * SIZE and publisher.loading() == ("server-0",)
    late.set()
    while publisher.loading():
        await asyncio.sleep(0)
    assert seen[-1] == ("http://0", 1, N_TENSORS)
    assert [server.state for server in pool.servers()] == [ServerState.READY] * 2
    await given_up(lambda: weights.held)


async def test_who_is_sent_weights_alone_holds_them_as_long():
    client, weights = Client(), Weights()
    pool, publisher = await publisher_to(1, client, weights)
    sending = asyncio.create_task(publisher.send_to(pool.servers()[0], await publisher.prepare(4), 4))
    await client.asked.wait()
    assert weights.held == N_TENSORS * SIZE
    client.may_take.set()
    await sending
    del sending
    await given_up(lambda: weights.held)


async def test_a_refused_version_is_given_up_too():
    weights = Weights()

    async def refuse(url, **how):
        raise WeightsRefused("no")

    _, publisher = await publisher_to(1, SimpleNamespace(update_weights_from_tensor=refuse), weights)
    with pytest.raises(WeightsRefused, match="no server took"):
        await publisher.publish(1)
    await given_up(lambda: (gc.collect(), weights.held)[1])  # the error's traceback is in a cycle


async def test_buckets_are_given_up_when_all_have_them():
    flats = []

    async def send(server, buckets, version):
        flats.extend(weakref.ref(bucket.flat) for bucket in buckets)

    groups = SimpleNamespace(device="cpu", keep=lambda keys: None, send=send)
    _, publisher = await publisher_to(1, None, Weights(), groups=groups)
    await publisher.publish(1)
    assert flats
    await given_up(lambda: any(flat() is not None for flat in flats))
