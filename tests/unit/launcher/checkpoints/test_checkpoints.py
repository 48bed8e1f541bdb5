"""CheckpointStore: what is whole, what is refused and by what name, and what retention may remove."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import xxhash

from launcher.base import durable
from launcher.base.errors import CheckpointError
from launcher.checkpoints.checkpoint_store import CheckpointState, CheckpointStore
from launcher.checkpoints.manifest import Manifest
from tests.support.worlds.checkpoints import (
    FILES,
    FINGERPRINT,
    commit,
    fill,
    flip_one_bit,
    hidden,
    lose_manifest,
    name_of,
    save,
    steps_of,
    truncate,
)


def test_a_checkpoint_is_where_areal_looks_for_it_and_says_what_it_is(store):
    checkpoint = save(store, 13)
    assert checkpoint.path == store.root / "epoch1epochstep3globalstep13"
    manifest = json.loads((checkpoint.path / "manifest.json").read_text())
    assert set(manifest) == {
        "format",
        "global_step",
        "policy_version",
        "created_at",
        "files",
        "config_fingerprint",
        "health",
    }
    assert manifest["global_step"] == 13
    assert manifest["policy_version"] == 14
    assert manifest["config_fingerprint"] == FINGERPRINT
    assert set(manifest["files"]) == set(FILES)
    content = FILES["config.json"] + b"13"
    assert manifest["files"]["config.json"] == {
        "bytes": len(content),
        "checksum": f"xxh3_128:{xxhash.xxh3_128(content).hexdigest()}",
    }
    assert store.verify(checkpoint) == ()
    assert hidden(store) == []


def test_asking_creates_nothing(store):
    assert store.list() == ()
    assert store.latest_complete().checkpoint is None
    assert store.prune(1) == ()
    assert not store.root.parent.joinpath("default").exists()


def test_staged_is_not_yet_a_checkpoint(store):
    staged = store.stage(name_of(0))
    fill(staged)
    assert store.list() == ()
    assert staged.stat().st_dev == store.root.stat().st_dev


def test_list_is_by_step_not_by_text(store):
    for step in (9, 100, 20):
        save(store, step)
    assert steps_of(store) == [9, 20, 100]
    assert store.find(20).global_step == 20
    assert store.find(21) is None


@pytest.mark.parametrize("is_fetched", [False, True])
def test_everything_is_on_the_disk_before_the_name_is(store, monkeypatch, is_fetched):
    """A rename that reaches the disk before the data is the classic empty checkpoint after a power cut."""
    known = save(store, 1).manifest.files if is_fetched else None  # a fetched file is verified, and not hashed again
    done = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(fd):
        done.append(Path(f"/proc/self/fd/{fd}").readlink())
        real_fsync(fd)

    def rename(self, target):
        done.append(("rename", self))
        return real_rename(self, target)

    monkeypatch.setattr(durable.os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    staged = store.stage(name_of(0))
    fill(staged)
    commit(store, staged, 0, files=known)
    renamed_at = done.index(("rename", staged))
    written = {staged / name for name in (*FILES, "manifest.json")} | {staged, staged / "state"}
    assert written <= set(done[:renamed_at])
    assert store.root in done[renamed_at:]


def test_a_commit_never_overwrites_a_whole_checkpoint(store):
    first = save(store, 3)
    with pytest.raises(CheckpointError, match="epoch0epochstep3globalstep3 is committed already and complete"):
        save(store, 3)
    assert store.verify(first) == ()
    assert hidden(store) == []


def test_a_damaged_checkpoint_of_the_same_name_is_set_aside_not_lost(store):
    first = save(store, 3)
    (first.path / "config.json").unlink()
    second = save(store, 3)
    assert store.verify(second) == ()
    (aside,) = (store.root / "set_aside").iterdir()
    assert aside.name == "epoch0epochstep3globalstep3.damaged-1"
    assert (aside / "model.safetensors").exists()
    assert not (aside / "config.json").exists()


def test_what_a_restore_threw_away_makes_room_for_the_same_steps(store):
    for step in (1, 2, 3):
        save(store, step)
    moved = store.set_aside_after(1)
    assert [path.name.split(".")[0][-1] for path in moved] == ["3", "2"]
    assert steps_of(store) == [1]
    save(store, 2)
    store.set_aside_after(-1)
    assert steps_of(store) == []
    assert len(list((store.root / "set_aside").iterdir())) == 4


def test_what_another_process_has_put_aside_meanwhile_is_no_failure(store, tmp_path, monkeypatch):
    """The Coordinator condemns while the trainer goes back: a restore that failed for it would accuse a sound step."""
    for step in (1, 2, 3):
        save(store, step)
    listed = store.list()
    CheckpointStore(store.root).condemn_after(2)
    monkeypatch.setattr(store, "list", lambda: listed)  # as it was before
    assert [path.name.partition(".")[0] for path in store.set_aside_after(1)] == [str(name_of(2))]
    aside = sorted(path.name.partition(".")[2] for path in (store.root / "set_aside").iterdir())
    assert aside == ["condemned-1", "superseded-1"]


def test_only_what_was_staged_here_for_that_step_can_be_committed(store, tmp_path):
    staged = store.stage(name_of(4))
    fill(staged)
    with pytest.raises(CheckpointError, match="not staged here for step 5"):
        commit(store, staged, 5)
    with pytest.raises(CheckpointError, match="not staged here"):
        commit(store, tmp_path, 5)


def test_an_empty_folder_or_a_link_is_not_a_checkpoint(store, tmp_path):
    with pytest.raises(CheckpointError, match="holds no files"):
        commit(store, store.stage(name_of(0)), 0)
    staged = store.stage(name_of(0))
    (staged / "model.safetensors").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a plain file"):
        commit(store, staged, 0)
    assert hidden(store) == []
    assert store.list() == ()


def lose_a_file(path):
    (path / "state" / "optimizer.bin").unlink()


def half_manifest(path):
    file = path / "manifest.json"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def edit_manifest(**changes):
    def damage(path):
        file = path / "manifest.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def empty(path):
    shutil.rmtree(path)
    path.mkdir()


def make_unreadable_file(path):
    (path / "config.json").unlink()
    (path / "config.json").mkdir()


DAMAGES = [
    (truncate, r"model\.safetensors has 2999 bytes, its manifest says 3001"),
    (flip_one_bit, r"model\.safetensors was changed: its checksum"),
    (lose_a_file, r"state/optimizer\.bin is missing"),
    (half_manifest, r"globalstep7/manifest\.json is not a complete manifest"),
    (edit_manifest(global_step=6), r"globalstep7/manifest\.json is of step 6"),
    (edit_manifest(global_step="7"), r"manifest: .*`\$.global_step`"),
    (edit_manifest(global_step=True), r"manifest: .*got `bool` - at `\$.global_step`"),
    (edit_manifest(policy_version=None), r"`\$.policy_version`"),
    (edit_manifest(created_at="noon"), r"`\$.created_at`"),
    (edit_manifest(created_at=-1), r">= 0.* - at `\$.created_at`"),
    (edit_manifest(health=3), r"`\$.health`"),
    (edit_manifest(files={}), r"`\$.files`"),
    (edit_manifest(files={"../../x": {"bytes": 1, "checksum": "sha256:"}}), r"leads out of the checkpoint"),
    (edit_manifest(files={"/etc/passwd": {"bytes": 1, "checksum": "sha256:"}}), r"leads out of the checkpoint"),
    (edit_manifest(files={"config.json": {"bytes": 1}}), r"not a complete manifest"),
    (edit_manifest(files=[[1]]), r"not a complete manifest"),
    (edit_manifest(files={"config.json": {"bytes": "1", "checksum": "sha256:0"}}), r"`\$.files\[...\].bytes`"),
    (edit_manifest(files={"config.json": {"bytes": 1, "checksum": None}}), r"`\$.files\[...\].checksum`"),
    (edit_manifest(files={"config.json": {"bytes": 1, "checksum": "md5:0"}}), r"'md5:0' is no checksum that this"),
    (edit_manifest(created_at=float("nan")), r"not a complete manifest"),
    (edit_manifest(created_at=10**400), r"not a complete manifest"),
    (edit_manifest(health={"reward_mean": 10**400}), r"not a complete manifest"),
    (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), r"not a complete manifest"),
    (edit_manifest(format="grpo-checkpoint/9"), r"format is 'grpo-checkpoint/9'"),
    (edit_manifest(surprise=1), r"unknown field `surprise`"),
    (empty, r"globalstep7 is empty"),
    (lose_manifest, r"globalstep7 has no manifest\.json"),
    (make_unreadable_file, r"config\.json"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[message for _, message in DAMAGES])
def test_every_damage_is_refused_by_name_and_the_older_one_is_used(store, damage, message):
    save(store, 6)
    damaged = save(store, 7)
    damage(damaged.path)
    with pytest.raises(CheckpointError, match=message):
        store.verify(damaged)
    newest = CheckpointStore(store.root).latest_complete()
    assert newest.checkpoint.global_step == 6
    (skipped,) = newest.skipped
    assert damaged.path.name in skipped
    assert re.search(message, skipped)


def test_extra_files_are_said_not_refused(store):
    checkpoint = save(store, 0)
    (checkpoint.path / "notes.txt").write_text("kept for the paper")
    assert store.verify(checkpoint) == ("notes.txt",)


def test_areals_own_folders_are_listed_as_unverified(store):
    folder = store.root / "epoch0epochstep9globalstep9"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"x")
    (store.root / "recover_checkpoint").mkdir()
    (store.root / "weight_update_v3").mkdir()
    (store.root / "epoch0epochstep1globalstep1").write_text("a file, not a folder")
    (checkpoint,) = store.list()
    assert checkpoint.state is CheckpointState.UNVERIFIED
    assert checkpoint.manifest is None
    newest = store.latest_complete()
    assert newest.checkpoint is None
    assert "no manifest.json" in newest.skipped[0]


def test_a_manifest_survives_its_own_encoding(store):
    checkpoint = save(store, 5)
    assert Manifest.read(checkpoint.path) == checkpoint.manifest
    assert checkpoint.manifest.total_bytes == sum(len(data) + 1 for data in FILES.values())
