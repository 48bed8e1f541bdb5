"""Tensors on their way to the servers take memory as long as a server loads them, and no longer."""

import asyncio
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from actors.serving import weight_buckets
from actors.serving.weight_buckets import in_buckets
from actors.weights.group_transport import GroupTransport
from actors.weights.weight_publisher import WeightPublisher
from actors.weights.weight_transports import TensorTransport
from launcher.base.errors import WeightsRefused
from launcher.base.messages import ServerState
from tests.support.machine import scaled
from tests.support.ready_servers import pool_of

SIZE, N_TENSORS = 1024, 10


class Held:
    """Counts the bytes of tensors that are still held."""

    def __init__(self):
        self.now = self.most = 0

    def add(self, tensor):
        self.now += tensor.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(tensor, self._gone, tensor.nbytes)

    def _gone(self, size):
        self.now -= size


class Weights:
    """Makes each tensor when it is asked for, in bfloat16. `held`: of those."""

    def __init__(self):
        self.held = Held()

    def __call__(self):
        for index in range(N_TENSORS):
            tensor = torch.zeros(SIZE // 2, dtype=torch.bfloat16)
            self.held.add(tensor)
            yield f"w{index}", tensor
            del tensor


@pytest.fixture
def sent(monkeypatch):
    """The bytes of buckets that are still held."""
    held, make = Held(), weight_buckets._bucket

    def made(part, **how):
        bucket = make(part, **how)
        held.add(bucket.flat)
        return bucket

    monkeypatch.setattr(weight_buckets, "_bucket", made)
    return held


class Client:
    """Takes what it is sent, once `may_take` is set."""

    def __init__(self):
        self.asked = asyncio.Event()
        self.may_take = asyncio.Event()

    async def update_weights_from_tensor(self, url, *, buckets, **how):
        assert names(buckets) == N_TENSORS
        self.asked.set()
        await self.may_take.wait()


def names(buckets):
    return sum(len(bucket.names) for bucket in buckets)


async def given_up(is_held):
    """The thread that made them may still be letting go."""
    async with asyncio.timeout(scaled(20.0)):
        while is_held():
            await asyncio.sleep(0.001)


async def publisher_to(n_servers, client, weights, *, transport=None):
    pool = await pool_of([f"http://{index}" for index in range(n_servers)])
    return pool, WeightPublisher(pool, transport or TensorTransport(client, weights, tp_size=1, timeout_s=5))


def test_of_buckets_one_is_held_twice_at_a_time():
    weights = Weights()
    buckets = in_buckets(weights(), device="cpu", most_bytes=2 * SIZE)
    assert sum(bucket.flat.nbytes for bucket in buckets) == N_TENSORS * SIZE
    assert len(buckets) == N_TENSORS // 2
    assert weights.held.most == 3 * SIZE, "two of a bucket, and the next one's first, which didn't fit"
    assert weights.held.now == 0


async def test_nothing_is_held_until_the_next_version(sent):
    """Beside the gradients of each step one version was held, and two while the next one was made."""
    client = Client()
    client.may_take.set()
    _, publisher = await publisher_to(2, client, Weights())
    for version in (1, 2, 3):
        await publisher.publish(version)
        assert publisher.version == version
        await given_up(lambda: sent.now)
    assert sent.most == N_TENSORS * SIZE, "once, however many servers load it"


async def test_what_a_late_server_loads_is_held_for_it(sent, monkeypatch):
    monkeypatch.setattr("actors.weights.weight_publisher.PATIENCE_S", 0.0)
    client = Client()
    late = asyncio.Event()

    async def update(url, *, buckets, weight_version, **how):
        if url == "http://0" and weight_version == 1:
            await late.wait()
        seen.append((url, weight_version, names(buckets)))

    seen = []
    client.update_weights_from_tensor = update
    pool, publisher = await publisher_to(2, client, Weights())
    await publisher.publish(1)
    assert sent.now == N_TENSORS * SIZE
    assert publisher.loading() == ("server-0",)
    late.set()
    while publisher.loading():
        await asyncio.sleep(0)
    assert seen[-1] == ("http://0", 1, N_TENSORS)
    assert [server.state for server in pool.servers()] == [ServerState.READY] * 2
    await given_up(lambda: sent.now)


async def test_who_is_sent_weights_alone_holds_them_as_long(sent):
    client = Client()
    pool, publisher = await publisher_to(1, client, Weights())
    sending = asyncio.create_task(publisher.send_to(pool.servers()[0], await publisher.prepare(4), 4))
    await client.asked.wait()
    assert sent.now == N_TENSORS * SIZE
    client.may_take.set()
    await sending
    del sending
    await given_up(lambda: sent.now)


async def test_a_refused_version_is_given_up_too(sent):
    async def refuse(url, **how):
        raise WeightsRefused("no")

    _, publisher = await publisher_to(1, SimpleNamespace(update_weights_from_tensor=refuse), Weights())
    with pytest.raises(WeightsRefused, match="no server took"):
        await publisher.publish(1)
    assert sent.most == N_TENSORS * SIZE
    await given_up(lambda: (gc.collect(), sent.now)[1])  # the error's traceback is in a cycle


async def test_what_goes_over_a_group_is_given_up_when_all_have_it(sent):
    async def send(server, buckets, version):
        assert names(buckets) == N_TENSORS

    groups = GroupTransport(None, Weights(), device="cpu", tp_size=1, timeout_s=5)
    groups.send = send
    _, publisher = await publisher_to(1, None, None, transport=groups)
    await publisher.publish(1)
    assert sent.most == N_TENSORS * SIZE
    await given_up(lambda: sent.now)
