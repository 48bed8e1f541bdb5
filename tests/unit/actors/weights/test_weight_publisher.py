"""New weights reach every server that takes them, and only those that confirmed get traffic."""

import asyncio
import contextlib
import dataclasses
import json
import threading
from functools import partial

import pytest
import torch

from actors.serving.sglang_client import SGLangClient
from actors.weights import weight_publisher
from actors.weights.weight_folders import FolderTransport, WeightFolders
from actors.weights.weight_publisher import WeightPublisher
from actors.weights.weight_transports import TensorTransport, WeightTransport
from launcher.base.errors import ServerError, WeightsRefused
from launcher.base.messages import ServerState
from tests.support.machine import scaled
from tests.support.ready_servers import pool_of
from tests.support.worlds.rollout import fault

pytestmark = pytest.mark.slow

deadline_s = partial(scaled, 60.0)


def export(folder):
    (folder / "config.json").write_text(json.dumps({"vocab_size": 60}))
    (folder / "model.safetensors").write_bytes(b"weights")


@contextlib.asynccontextmanager
async def publishing_to(urls, folders, *, timeout_s):
    """A publisher, and its pool of READY servers at version 0."""
    async with SGLangClient() as client:
        pool = await pool_of(urls)
        tensors = TensorTransport(client, lambda: {"w": torch.zeros(3)}.items(), tp_size=1, timeout_s=timeout_s)
        transport = FolderTransport(client, folders, timeout_s=timeout_s) if folders else tensors
        publisher = WeightPublisher(pool, transport)
        yield publisher, pool
        await publisher.close()


async def publish(urls, version, *, folders, before=()):
    """Publish once to fresh servers; the pool's word on each afterwards."""
    async with publishing_to(urls, folders, timeout_s=deadline_s()) as (publisher, pool):
        for url, body in before:
            await fault(url, body)
        await publisher.publish(version)
        return word(pool)


@pytest.mark.parametrize("on_disk", [True, False])
async def test_every_server_confirms_the_version(servers, tmp_path, monkeypatch, on_disk):
    monkeypatch.setattr(weight_publisher, "PATIENCE_S", deadline_s())
    folders = WeightFolders(tmp_path / "weights", export) if on_disk else None
    assert await publish(servers, 4, folders=folders) == [(ServerState.READY, 4)] * 2


async def test_a_server_that_refuses_is_stale_and_does_not_hold_up_the_other(servers, tmp_path):
    refuse = {"kind": "500", "path": "/update_weights_from_disk", "times": 1}
    states = await publish(servers, 4, folders=WeightFolders(tmp_path / "w", export), before=[(servers[0], refuse)])
    assert states == [(ServerState.STALE, 0), (ServerState.READY, 4)]


async def test_a_server_that_is_not_there_is_stale_and_does_not_hold_up_the_other(servers, tmp_path):
    states = await publish(["http://127.0.0.1:9", servers[1]], 4, folders=WeightFolders(tmp_path / "w", export))
    assert states == [(ServerState.STALE, 0), (ServerState.READY, 4)]


async def test_no_server_that_takes_them_halts_with_each_ones_reason(tmp_path):
    with pytest.raises(WeightsRefused, match=r"version 4: server-0: POST .*server-1: POST"):
        await publish(["http://127.0.0.1:9", "http://127.0.0.1:7"], 4, folders=WeightFolders(tmp_path / "w", export))


def test_folders_are_whole_and_only_the_newest_stay(tmp_path):
    folders = WeightFolders(tmp_path / "w", export)
    for version in range(5):
        folders.write(version)
        folders.forget_before(version)
    assert sorted(p.name for p in (tmp_path / "w").iterdir()) == ["v3", "v4"]
    folders.remove()
    assert not (tmp_path / "w").exists()


def test_what_an_earlier_attempt_left_is_cleared(tmp_path):
    WeightFolders(tmp_path / "w", export).write(9)
    WeightFolders(tmp_path / "w", export)
    assert list((tmp_path / "w").iterdir()) == []


def test_a_full_memory_leaves_nothing_half_written_and_names_the_way_out(tmp_path):
    def half(folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    folders = WeightFolders(tmp_path / "w", half)
    with pytest.raises(WeightsRefused, match=rf"No space left[\s\S]*room in the file system of {tmp_path}"):
        folders.write(1)
    assert list((tmp_path / "w").iterdir()) == []


# ── one that stalls ──


async def until(holds):
    async with asyncio.timeout(deadline_s()):
        while not holds():
            await asyncio.sleep(0.01)


def word(pool):
    return [(s.state, s.weight_version) for s in pool.servers()]


STALLS = {"kind": "slow", "path": "/update_weights_from_disk", "times": 1, "seconds": 10_000}


async def test_a_server_that_stalls_is_stale_and_the_step_goes_on_without_its_whole_deadline(
    servers, tmp_path, monkeypatch
):
    async with publishing_to(servers, WeightFolders(tmp_path / "w", export), timeout_s=1000) as (publisher, pool):
        await fault(servers[0], STALLS)
        async with asyncio.timeout(deadline_s()):  # far below the server's own
            await publisher.publish(1)
        assert word(pool) == [(ServerState.STALE, 0), (ServerState.READY, 1)]
        assert publisher.loading() == ("server-0",)
        async with pool.acquire(1) as leased:
            assert leased.name == "server-1", "traffic starts"
        monkeypatch.setattr(weight_publisher, "PATIENCE_S", 1000)
        async with asyncio.timeout(deadline_s()):  # it is not waited for again
            for version in range(2, 6):
                await publisher.publish(version)
        assert (tmp_path / "w" / "v1").is_dir(), "it may still be reading that"
        assert word(pool) == [(ServerState.STALE, 0), (ServerState.READY, 5)]


@pytest.mark.parametrize("state", [ServerState.STALE, ServerState.SUSPECT])
async def test_a_server_without_traffic_is_not_waited_for(servers, tmp_path, monkeypatch, state):
    """A restarted server that loaded its first weights held each of two steps for a second."""
    monkeypatch.setattr(weight_publisher, "PATIENCE_S", 1000)
    async with publishing_to(servers, WeightFolders(tmp_path / "w", export), timeout_s=1000) as (publisher, pool):
        await pool.update([dataclasses.replace(pool.servers()[0], state=state)])
        await fault(servers[0], STALLS)
        async with asyncio.timeout(deadline_s()):
            await publisher.publish(1)
        assert publisher.loading() == ("server-0",)


async def test_one_that_was_late_gets_the_newest_next_and_then_traffic(servers, tmp_path):
    async with publishing_to(servers, WeightFolders(tmp_path / "w", export), timeout_s=1000) as (publisher, pool):
        await fault(servers[0], STALLS | {"seconds": 4})
        await publisher.publish(1)
        await publisher.publish(2)
        assert word(pool)[0] == (ServerState.STALE, 0)
        await until(lambda: word(pool) == [(ServerState.READY, 2)] * 2)
        await until(lambda: publisher.loading() == ())


class Given(WeightTransport):
    """Each server has taken them when `given` is set."""

    def __init__(self):
        self.given = asyncio.Event()

    async def prepare(self, version, lineage):
        return lambda server: self.given.wait()


async def test_what_has_confirmed_is_not_being_sent_weights_any_more():
    """One that was admitted in that very moment waited for a confirmation that had come: it got no traffic."""
    pool, transport, seen = await pool_of(["http://0"]), Given(), []
    publisher, confirm = WeightPublisher(pool, transport), pool.confirm

    async def then_look(*news):
        await confirm(*news)
        asyncio.get_running_loop().call_soon(
            lambda: seen.append((word(pool), publisher.loading(), publisher.is_loading(pool.servers()[0].key)))
        )

    pool.confirm = then_look
    transport.given.set()
    await publisher.publish(1)
    await until(lambda: seen)
    assert seen == [([(ServerState.READY, 1)], (), False)]


async def test_that_its_predecessor_is_being_sent_weights_says_nothing_of_an_incarnation():
    """Its admission waited for `rollout.finish_s`: so long the weights of the one before waited for its requests."""
    pool, transport = await pool_of(["http://0"]), Given()
    publisher = WeightPublisher(pool, transport)
    publishing = asyncio.create_task(publisher.publish(1))
    await until(publisher.loading)
    assert [publisher.is_loading(("server-0", generation)) for generation in (0, 1)] == [True, False]
    transport.given.set()
    await publishing


async def test_one_that_misses_its_deadline_stays_stale_with_the_reason_and_is_somebody_elses_to_mend(
    servers, tmp_path
):
    async with publishing_to(servers, WeightFolders(tmp_path / "w", export), timeout_s=2) as (publisher, pool):
        await fault(servers[0], STALLS)
        await publisher.publish(1)
        await until(lambda: publisher.loading() == ())
        assert word(pool) == [(ServerState.STALE, 0), (ServerState.READY, 1)]
        assert "no answer within 2 s" in pool.servers()[0].reason


async def test_a_restore_ends_what_is_still_loading(servers, tmp_path):
    async with publishing_to(servers, WeightFolders(tmp_path / "w", export), timeout_s=1000) as (publisher, pool):
        await fault(servers[0], STALLS)
        await publisher.publish(1)
        await publisher.begin(2)
        await publisher.publish(1)
        assert pool.servers()[1].lineage == 2


async def test_what_a_life_that_is_over_was_sent_says_nothing_of_the_next(servers, tmp_path):
    async with publishing_to(servers, WeightFolders(tmp_path / "w", export), timeout_s=2) as (publisher, pool):
        await fault(servers[0], STALLS)
        await publisher.publish(1)
        await pool.update([dataclasses.replace(pool.servers()[0], generation=1, state=ServerState.READY)])
        await until(lambda: publisher.loading() == ())
        assert word(pool)[0] == (ServerState.READY, 0)


async def test_a_publish_does_not_wait_for_a_server_whose_machine_is_gone(servers, tmp_path):
    """Nothing breaks its connection; alone in the fleet it held the step for the whole deadline."""
    async with publishing_to(servers[:1], WeightFolders(tmp_path / "w", export), timeout_s=7200) as (
        publisher,
        pool,
    ):
        await fault(servers[0], STALLS)
        publishing = asyncio.create_task(publisher.publish(1))
        await until(lambda: publisher.loading() == ("server-0",))
        dead = dataclasses.replace(pool.servers()[0], state=ServerState.DEAD)
        await pool.update([dead])
        async with asyncio.timeout(deadline_s()):
            with pytest.raises(WeightsRefused, match="no server took"):
                await publishing
        assert pool.servers() == (dead,)


async def test_whoever_sends_weights_to_one_server_does_not_wait_for_a_life_that_is_over(servers, tmp_path):
    folders = WeightFolders(tmp_path / "w", export)
    async with publishing_to(servers[:1], folders, timeout_s=7200) as (publisher, pool):
        await fault(servers[0], STALLS)
        alive = pool.servers()[0]
        sending = asyncio.create_task(publisher.send_to(alive, await publisher.prepare(1), 1))
        await until(lambda: pool.servers()[0].state is ServerState.STALE)
        dead = dataclasses.replace(alive, state=ServerState.DEAD)
        await pool.update([dead])
        async with asyncio.timeout(deadline_s()):
            with pytest.raises(ServerError, match="ended"):
                await sending
        assert pool.servers() == (dead,)
        await pool.update([dataclasses.replace(dead, generation=1, state=ServerState.STALE)])
        with pytest.raises(ServerError, match="ended"):  # a late order
            await publisher.send_to(alive, await publisher.prepare(1), 1)
        assert pool.servers()[0].generation == 1


async def test_weights_that_a_server_was_ordered_to_load_stay_until_it_has_answered(servers, tmp_path):
    """While others served and the trainer stepped on, the folder was removed under a server that was slow to read it,
    and the order failed (`server.loading_failed`)."""
    async with publishing_to(servers, WeightFolders(tmp_path / "w", export), timeout_s=1000) as (publisher, pool):
        await fault(servers[0], STALLS)
        send = await publisher.prepare(1)
        sending = asyncio.create_task(publisher.send_to(pool.servers()[0], send, 1))
        await until(lambda: word(pool)[0] == (ServerState.STALE, 0))
        for version in range(2, 6):
            await publisher.publish(version)
        assert (tmp_path / "w" / "v1").is_dir()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await publisher.publish(6)
        assert not (tmp_path / "w" / "v1").exists(), "nobody reads it any more"


@pytest.mark.parametrize("order_first", [True, False])
async def test_an_order_and_a_publish_reach_one_server_one_after_the_other(servers, tmp_path, monkeypatch, order_first):
    """Asked after an order for version 18, a server reported 19, which a publish had sent meanwhile."""
    async with publishing_to(servers[:1], WeightFolders(tmp_path / "w", export), timeout_s=deadline_s()) as (
        publisher,
        pool,
    ):
        real, sent, under_way, may_end = publisher._transport._client.update_weights_from_disk, [], [], asyncio.Event()

        async def slowly(url, **order):
            under_way.append(order["weight_version"])
            assert len(under_way) == 1, "two updates at once"
            await may_end.wait()
            await real(url, **order)
            sent.append(under_way.pop())

        monkeypatch.setattr(publisher._transport._client, "update_weights_from_disk", slowly)
        server, send = pool.servers()[0], await publisher.prepare(1)
        calls = [lambda: publisher.send_to(server, send, 1), lambda: publisher.publish(2)]
        earlier, later = calls if order_first else calls[::-1]
        first = asyncio.create_task(earlier())
        await until(lambda: under_way)
        second = asyncio.create_task(later())
        locks = publisher._one_at_a_time
        await until(lambda: any(lock._waiters for lock in locks.values()) or second.done())  # it waits, or did not
        may_end.set()
        async with asyncio.timeout(deadline_s()):
            answers = await asyncio.gather(first, second)
            await until(lambda: word(pool)[0][1] == 2)
    assert sent == ([1, 2] if order_first else [2])
    assert answers[0 if order_first else 1] == (1 if order_first else 2)


async def test_who_was_called_dead_in_error_gets_weights_when_the_supervisor_says_so(servers, tmp_path):
    folders = WeightFolders(tmp_path / "w", export)
    async with publishing_to(servers[:1], folders, timeout_s=deadline_s()) as (publisher, pool):
        alive = pool.servers()[0]
        await pool.update([dataclasses.replace(alive, state=ServerState.DEAD)])
        await publisher.send_to(alive, await publisher.prepare(1), 1)
        assert word(pool) == [(ServerState.STALE, 1)]


@pytest.mark.parametrize("prepares", [False, True])
def test_the_loop_goes_on_while_the_model_is_written(servers, tmp_path, prepares):
    """The whole model was exported on the loop of the rollouts: nobody was answered meanwhile."""
    writing, may_end, late = threading.Event(), threading.Event(), []

    def let_end():
        if not may_end.is_set():
            late.append(True)
            may_end.set()

    def export_slowly(folder):
        writing.set()
        assert may_end.wait(deadline_s())
        export(folder)

    async def scenario():
        async with publishing_to(servers, WeightFolders(tmp_path / "w", export_slowly), timeout_s=deadline_s()) as (
            publisher,
            pool,
        ):
            work = asyncio.create_task(publisher.prepare(4) if prepares else publisher.publish(4))
            await asyncio.to_thread(writing.wait, deadline_s())
            await pool.mark_stale(("server-0", 0), "the loop still runs")
            may_end.set()
            await work
            return publisher.newest.version

    watchdog = threading.Timer(scaled(30.0), let_end)  # else a loop that stands would never end
    watchdog.start()
    try:
        assert asyncio.run(scenario()) == 4
        assert not late, "the loop stood still until the watchdog let the export end"
    finally:
        watchdog.cancel()


async def test_two_that_need_the_same_folder_write_it_once(servers, tmp_path):
    written, may_end = [], threading.Event()

    def export_once(folder):
        written.append(folder)
        assert may_end.wait(deadline_s())
        export(folder)

    async with publishing_to(servers, WeightFolders(tmp_path / "w", export_once), timeout_s=deadline_s()) as (
        publisher,
        _,
    ):
        both = asyncio.gather(publisher.publish(4), publisher.prepare(4))
        await until(lambda: written and (publisher._exporting._waiters or len(written) > 1))  # it waits, or did not
        may_end.set()
        await both
    assert len(written) == 1
