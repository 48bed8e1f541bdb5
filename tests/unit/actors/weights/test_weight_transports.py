"""Weights go through folders by themselves where a server fails twice to take them as tensors, and come back."""

import contextlib
import errno

import pytest
import torch

from actors.rollout.server_pool import ServerPool
from actors.weights.weight_folders import FolderTransport, WeightFolders
from actors.weights.weight_publisher import WeightPublisher
from actors.weights.weight_transports import (
    AGAIN_AFTER,
    AGAIN_AT_MOST,
    FallbackTransport,
    TensorTransport,
    WeightTransport,
)
from launcher.base.errors import RequestFailed, WeightsRefused
from launcher.base.messages import ServerInfo, ServerState

URLS = ("http://one", "http://two")


def export(folder):
    (folder / "model.safetensors").write_bytes(b"weights")


class Client:
    """Notes each way, version and server. `refuses`: for each server, how many more updates as tensors it refuses."""

    def __init__(self, refuses=None, kind="http_5xx"):
        self.sent = []
        self.refuses = refuses or {}
        self.kind = kind

    async def update_weights_from_tensor(self, url, *, weight_version, **rest):
        self.sent.append(("tensor", weight_version, url))
        if self.refuses.get(url, 0):
            self.refuses[url] -= 1
            if self.kind == "http_5xx":
                raise WeightsRefused(f"{url}: the handle can't be opened")
            raise RequestFailed(f"{url}: no answer", kind=self.kind)

    async def update_weights_from_disk(self, url, *, path, weight_version, timeout_s):
        assert (path / "model.safetensors").exists()
        self.sent.append(("disk", weight_version, url))


class Run:
    def __init__(self, folder, client, urls=URLS[:1]):
        self.told = []
        self.again = []
        self.folder = folder
        self.client = client
        self.urls = urls

    async def begin(self, *, by_files=False):
        self.pool = ServerPool(lambda url: None)
        await self.pool.update(
            ServerInfo(name=url, index=i, generation=0, state=ServerState.READY, url=url, weight_version=0)
            for i, url in enumerate(self.urls)
        )
        tensors = TensorTransport(self.client, lambda: {"w": torch.zeros(3)}.items(), tp_size=1, timeout_s=5)
        self.transport = FallbackTransport(
            tensors,
            self.files,
            what="tensors",
            is_living=self.pool.is_living,
            again=lambda: self.again.append(1),
        )
        self.publisher = WeightPublisher(self.pool, self.files("as the settings say") if by_files else self.transport)
        return self

    def files(self, reason):
        self.told.append(reason)
        return FolderTransport(self.client, WeightFolders(self.folder / "w", export), timeout_s=5)

    def held(self):
        return [(server.state, server.weight_version) for server in self.pool.servers()]

    def ways(self, version):
        return [way for way, of, _ in self.client.sent if of == version]


async def test_the_second_failure_takes_files_at_once_and_for_a_while(tmp_path):
    run = await Run(tmp_path, Client({URLS[0]: 99})).begin()
    await run.publisher.publish(1)
    assert run.ways(1) == ["tensor", "tensor", "disk"]
    assert run.held() == [(ServerState.READY, 1)]
    await run.publisher.publish(2)
    assert run.ways(2) == ["disk"]
    (reason,) = run.told
    assert "http://one failed to take tensors: http://one: the handle can't be opened" in reason
    assert run.publisher.newest.version == 2, "a restarted server starts from these"


async def test_the_fast_way_is_tried_again_later_and_then_no_folder_is_the_newest(tmp_path):
    run = await Run(tmp_path, Client({URLS[0]: 2})).begin()
    last = AGAIN_AFTER + 1
    for version in range(1, last + 1):
        await run.publisher.publish(version)
    assert run.ways(1) == ["tensor", "tensor", "disk"]
    assert run.ways(last - 1) == ["disk"]
    assert run.ways(last) == ["tensor"]
    assert run.again == [1]
    assert run.publisher.newest is None, "a restarted server would start from older weights"


async def test_where_files_are_the_setting_no_other_way_is_ever_tried(tmp_path):
    """A run with actor.weight_update_mode=disk sent tensors from its 21st publish on."""
    run = await Run(tmp_path, Client()).begin(by_files=True)
    for version in range(1, AGAIN_AFTER + 3):
        await run.publisher.publish(version)
    assert {way for way, *_ in run.client.sent} == {"disk"}
    assert run.again == []


async def test_one_failure_is_tried_again_and_changes_nothing(tmp_path):
    run = await Run(tmp_path, Client({URLS[0]: 1})).begin()
    await run.publisher.publish(1)
    run.client.refuses[URLS[0]] = 1
    await run.publisher.publish(2)
    assert run.ways(1) == run.ways(2) == ["tensor", "tensor"]
    assert run.told == []


async def test_one_server_that_never_takes_them_is_enough_whatever_the_others_do(tmp_path):
    """Each failure of its is followed by a success of the other."""
    run = await Run(tmp_path, Client({URLS[0]: 99}), URLS).begin()
    await run.publisher.publish(1)
    assert run.held() == [(ServerState.STALE, 0), (ServerState.READY, 1)]
    first = run.pool.servers()[0]
    send = await run.publisher.prepare(1)
    with pytest.raises(WeightsRefused):  # as the Coordinator orders it
        await run.publisher.send_to(first, send, 1)
    assert len(run.told) == 1
    await run.publisher.send_to(first, await run.publisher.prepare(1), 1)
    assert run.client.sent[-1] == ("disk", 1, URLS[0])
    assert run.held() == [(ServerState.STALE, 1), (ServerState.READY, 1)]


async def test_a_server_that_is_not_there_says_nothing_of_the_way(tmp_path):
    run = await Run(tmp_path, Client({URLS[0]: 99}, kind="refused")).begin()
    for version in (1, 2, 3):
        with pytest.raises(WeightsRefused, match="no server took"):
            await run.publisher.publish(version)
    assert run.told == []
    assert len(run.client.sent) == 3


# ── when, server by server ──


class Way:
    """A fast way and folders to the servers "a" and "b"."""

    def __init__(self):
        self.reasons = []
        self.again = []
        self.refuses = False
        self.transport = FallbackTransport(
            Made(self.fast),
            self.files,
            what="tensors",
            is_living=lambda server: True,
            again=lambda: self.again.append(1),
        )

    def files(self, reason):
        self.reasons.append(reason)
        return Made(lambda server: None)

    def fast(self, server):
        if self.refuses:
            raise WeightsRefused("no")

    async def send(self, name, *, refuses, to=None):
        """Whether it made all go through folders."""
        before = len(self.reasons)
        self.refuses = refuses
        send = to or await self.transport.prepare(1, 0)
        with contextlib.suppress(WeightsRefused):
            await send(ServerInfo(name=name, index=0, generation=0, state=ServerState.READY))
        return len(self.reasons) > before

    async def by_folders(self):
        return (await self.transport.prepare(1, 0)).__name__ == "to_folders"


class Made(WeightTransport):
    def __init__(self, take):
        self.take = take

    async def prepare(self, version, lineage):
        async def to_folders(server):
            self.take(server)

        return to_folders


async def failed(way, name, to=None):
    return await way.send(name, refuses=True, to=to)


async def took(way, name, to=None):
    """Whether the fast way is said to work again."""
    before = len(way.again)
    await way.send(name, refuses=False, to=to)
    return len(way.again) > before


async def publishes_by_folders(way):
    n = 0
    while await way.by_folders():
        way.transport.published(1, reading=frozenset())
        n += 1
    return n


async def test_two_failures_in_a_row_of_one_server_take_folders():
    way = Way()
    fast = await way.transport.prepare(1, 0)
    assert [await failed(way, "a"), await failed(way, "b")] == [False, False]
    assert not await took(way, "a")
    assert not await failed(way, "a"), "not in a row"
    assert not await way.by_folders()
    assert await failed(way, "b")
    assert await way.by_folders()
    assert way.transport.n_failures == 4
    assert not await failed(way, "b", to=fast), "what was sent before says nothing of folders"
    assert way.transport.n_failures == 4


async def test_the_fast_way_is_tried_again_and_one_failure_then_doubles_the_wait():
    way = Way()
    await failed(way, "a")
    await failed(way, "a")
    waits = []
    for _ in range(6):
        waits.append(await publishes_by_folders(way))
        assert await failed(way, "a"), "at once"
    assert waits == [AGAIN_AFTER * 2**n for n in range(5)] + [AGAIN_AT_MOST]


async def test_once_it_works_again_it_is_said_once_and_all_is_as_before():
    way = Way()
    await failed(way, "a")
    await failed(way, "a")
    await publishes_by_folders(way)
    assert [await took(way, "a"), await took(way, "b")] == [True, False]
    assert not await failed(way, "a")
    assert await failed(way, "a")
    assert await publishes_by_folders(way) == AGAIN_AFTER


async def test_a_late_answer_from_before_folders_does_not_end_them():
    way = Way()
    fast = await way.transport.prepare(1, 0)
    await failed(way, "a")
    await failed(way, "a")
    assert not await took(way, "b", to=fast)
    assert await way.by_folders()


async def test_folders_that_can_not_be_made_are_tried_again_and_end_no_step_loop(tmp_path):
    """The disk's error went through, and from then on no failure was counted: the fast way failed for ever."""
    run = await Run(tmp_path, Client({URLS[0]: 5})).begin()
    is_full, files = True, run.files

    def made(reason):
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return files(reason)

    run.transport._new_folders = made
    for version in (1, 2):
        with pytest.raises(WeightsRefused, match="no server took weight version"):
            await run.publisher.publish(version)
    assert "No space left on device" in run.pool.servers()[0].reason
    is_full = False
    await run.publisher.publish(3)
    assert [way for way, version, _ in run.client.sent if version == 3] == ["tensor", "disk"]
