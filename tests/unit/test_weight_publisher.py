"""New weights reach every server that takes them, and only those that confirmed get traffic."""

import asyncio
import json

import pytest
import torch

from actors.server_pool import ServerPool
from actors.sglang_client import SGLangClient
from actors.weight_publisher import WeightFolders, WeightPublisher
from launcher.errors import WeightsRefused
from launcher.messages import ServerInfo, ServerState
from tests import stand_in_server
from tests.unit.test_rollout import fault


@pytest.fixture
def servers():
    with (
        stand_in_server.running("--weight-version", "0") as one,
        stand_in_server.running("--weight-version", "0") as two,
    ):
        yield one, two


def export(folder):
    (folder / "config.json").write_text(json.dumps({"vocab_size": 60}))
    (folder / "model.safetensors").write_bytes(b"weights")


def publish(urls, version, *, folders, before=None):
    """Publish once to fresh servers; the pool's word on each afterwards."""

    async def scenario():
        async with SGLangClient() as client:
            pool = ServerPool(lambda url: asyncio.sleep(0, None), hold_timeout_s=1)
            await pool.update(
                ServerInfo(
                    name=f"server-{i}", index=i, generation=0, state=ServerState.READY, url=url, weight_version=0
                )
                for i, url in enumerate(urls)
            )
            for url, body in before or []:
                await fault(url, body)
            publisher = WeightPublisher(
                client, pool, folders=folders, weights=lambda: {"w": torch.zeros(3)}, tp_size=1, timeout_s=2
            )
            try:
                await publisher.publish(version)
            finally:
                states = [(s.state, s.weight_version) for s in pool.servers()]
            return states

    return asyncio.run(scenario())


@pytest.mark.parametrize("on_disk", [True, False])
def test_every_server_confirms_the_version(servers, tmp_path, on_disk):
    folders = WeightFolders(tmp_path / "weights", export) if on_disk else None
    assert publish(servers, 4, folders=folders) == [(ServerState.READY, 4)] * 2


def test_a_server_that_refuses_is_stale_and_does_not_hold_up_the_other(servers, tmp_path):
    refuse = {"kind": "500", "path": "/update_weights_from_disk", "times": 1}
    states = publish(servers, 4, folders=WeightFolders(tmp_path / "w", export), before=[(servers[0], refuse)])
    assert states == [(ServerState.STALE, 0), (ServerState.READY, 4)]


def test_a_server_that_is_not_there_is_stale_and_does_not_hold_up_the_other(servers, tmp_path):
    states = publish(["http://127.0.0.1:9", servers[1]], 4, folders=WeightFolders(tmp_path / "w", export))
    assert states == [(ServerState.STALE, 0), (ServerState.READY, 4)]


def test_no_server_that_takes_them_halts_with_each_ones_reason(tmp_path):
    with pytest.raises(WeightsRefused, match=r"version 4: server-0: POST .*server-1: POST"):
        publish(["http://127.0.0.1:9", "http://127.0.0.1:7"], 4, folders=WeightFolders(tmp_path / "w", export))


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
    with pytest.raises(WeightsRefused, match=r"No space left[\s\S]*weight_update_mode"):
        folders.write(1)
    assert list((tmp_path / "w").iterdir()) == []
