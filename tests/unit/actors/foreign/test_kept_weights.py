"""Weights that a trainer gave once, after it has removed or overwritten its files."""

import pytest
from safetensors.torch import load_file

from actors.foreign.kept_weights import KeptWeights
from launcher.base.errors import WeightsRefused
from tests.support.worlds.foreign import give, remove


def held(kept):
    return load_file(f"{kept.newest.path}/model.safetensors")["w"][0].item()


def test_they_outlive_the_trainers_folder_and_two_of_them_are_kept(tmp_path):
    kept = KeptWeights(tmp_path / "kept")
    assert kept.newest is None
    for version in range(1, 5):
        source = give(tmp_path / f"update_{version}", version)
        inode = (source / "model.safetensors").stat().st_ino
        assert kept.take_weights(source) == version == kept.newest.version
        kept.folders.forget_before(version)
        remove(source)
        assert held(kept) == version
        assert (tmp_path / "kept" / f"v{version}" / "model.safetensors").stat().st_ino == inode, "no copy"
    assert sorted(one.name for one in (tmp_path / "kept").glob("v*")) == ["v3", "v4"]


def test_whoever_replaces_a_killed_door_finds_them(tmp_path):
    kept = KeptWeights(tmp_path / "kept")
    kept.take_weights(give(tmp_path / "update", 7))
    kept.note(ports=[4711], paused="abort", serves=True)
    again = KeptWeights(tmp_path / "kept")
    assert again.state == kept.state
    assert again.state.ports == [4711]
    assert (held(again), again.newest.version) == (7, 1)


def test_what_was_taken_is_known_also_when_it_is_gone(tmp_path):
    kept, source = KeptWeights(tmp_path / "kept"), give(tmp_path / "update", 1)
    assert not kept.has(source)
    kept.take_weights(source)
    assert kept.has(source)
    remove(source)
    assert kept.has(source)
    assert not kept.has(give(tmp_path / "update", 2)), "the same path, other weights"


def test_a_trainer_that_writes_into_its_files_again_does_not_change_what_is_kept_later(tmp_path):
    kept, source = KeptWeights(tmp_path / "kept"), give(tmp_path / "update", 1)
    kept.take_weights(source)
    give(source, 2)
    assert held(kept) == 2, "the first one can't be told from one that is never written again"
    kept.take_weights(source)
    assert kept.state.copies
    give(source, 3)
    assert held(kept) == 2


@pytest.mark.parametrize("damage", ["missing", "config", "truncated", "none"])
def test_a_folder_that_no_server_could_load_is_refused_and_nothing_changes(tmp_path, damage):
    kept = KeptWeights(tmp_path / "kept")
    kept.take_weights(give(tmp_path / "good", 1))
    source = tmp_path / "update"
    if damage != "missing":
        file = give(source, 2) / "model.safetensors"
        match damage:
            case "config":
                (source / "config.json").unlink()
            case "truncated":
                file.write_bytes(file.read_bytes()[:-4])
            case "none":
                file.unlink()
    with pytest.raises(WeightsRefused, match="update"):
        kept.take_weights(source)
    assert (kept.newest.version, held(kept)) == (1, 1)
