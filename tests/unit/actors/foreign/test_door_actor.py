"""The door's actor, without Ray: what it is refused, or waits for, is told of and breaks nothing."""

import asyncio
import errno

import pytest

from actors.foreign import door_actor
from actors.foreign.kept_weights import KeptWeights
from launcher.config.schema import RunConfig, SGLangConfig
from launcher.run_files.journal import read_lines
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_paths import RunPaths
from tests.support.worlds.door import until
from tests.support.worlds.foreign import give

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def actor(tmp_path, monkeypatch):
    """The door without Ray, and its paths; the trainer before has given it weights."""
    monkeypatch.setattr(door_actor, "listening_address", lambda host: host)
    monkeypatch.setattr(door_actor, "this_node", lambda: "")
    monkeypatch.setattr(door_actor, "bind_to_cluster", lambda config: None)
    config = RunConfig(experiment_name="door", sglang=SGLangConfig(model_path=str(tmp_path / "model")))
    paths = RunPaths(fileroot=tmp_path / "runs", user="u", experiment_name="door", trial_name="t")
    paths.prepare()
    ServerKeys.make(paths.keys)
    KeptWeights(paths.kept_weights(1)).take_weights(give(tmp_path / "trained", 1))
    return door_actor.DoorActor.__ray_metadata__.modified_class(config, paths, 1), paths


def refusals(paths):
    return [event["reason"] for event in read_lines(paths.events) if event["event"] == "door.refused"]


async def test_first_weights_that_can_not_be_sent_are_told_of_and_break_nothing(tmp_path, actor):
    door, paths = actor
    (tmp_path / "model").mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        (tmp_path / "model" / name).write_text("{}")
    try:
        await door.new_client(True)
        (task,) = door._tasks._tasks
        await asyncio.wait([task])
        assert (await door.view()).policy_version == 1, "the Coordinator still sees its servers"
    finally:
        await door.close()
    (told,) = refusals(paths)
    assert "no *.safetensors" in told
    assert str(tmp_path / "model") in told


async def test_what_new_weights_wait_for_is_told_once(tmp_path, actor, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(KeptWeights, "take_weights", full)
    door, paths = actor
    await door.view()
    servers = door._made.servers
    updating = asyncio.create_task(servers.update(give(tmp_path / "next", 2)))
    try:
        await until(lambda: servers.waits_for)
        await door.view()
        await door.view()
    finally:
        updating.cancel()
        await door.close()
    (told,) = refusals(paths)
    assert "No space left on device" in told
