"""recover_checkpoint/: prepared at once or not at all, taken back, and really gone on from, once, bit for bit."""

import json
import os
import shutil
import time

import pytest

from launcher.base.errors import CheckpointError, ConfigError, StorageError
from launcher.base.folder_swap import How, copy_folder
from launcher.checkpoints import pending_restore
from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoints
from launcher.checkpoints.pending_restore import find_prepared, prepare, take, undo
from launcher.checkpoints.resume_decision import already_finished
from launcher.policy.restore import choose
from launcher.run_files.journal import Journal
from tests.support.checkpoint_makers import flip, learned, make_trial, reseal, snapshot, truncate
from tests.support.worlds.training import Trial, identical


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    root = tmp_path_factory.mktemp("prepared")
    make_trial(root / "root", learned(root / "model"), (5, 15, 25))
    return root / "root"


@pytest.fixture
def paths(template, tmp_path):
    from tests.support.checkpoint_makers import trial_paths

    shutil.copytree(template, tmp_path / "root")
    return trial_paths(tmp_path / "root")


@pytest.fixture
def store(paths):
    return CheckpointStore(paths.default_checkpoints)


def hidden(paths):
    return [path.name for path in paths.checkpoints.iterdir() if path.name.startswith(".")]


def content(folder):
    return {name: data for name, data in snapshot(folder).items() if name != pending_restore.RECORD}


def test_a_prepared_checkpoint_is_the_same_files_under_another_name(paths, store):
    record = prepare(paths, store.find(15))
    assert content(paths.recover_checkpoint) == content(store.find(15).path)
    assert record.how == How.HARD_LINK
    one, other = store.find(15).path / "model.safetensors", paths.recover_checkpoint / "model.safetensors"
    assert one.samefile(other)
    assert pending_restore.read_record(paths.recover_checkpoint) == record
    assert hidden(paths) == []


def test_undo_puts_back_what_was_there_at_each_step(paths, store):
    before = snapshot(paths.checkpoints)
    prepare(paths, store.find(15))
    first = snapshot(paths.recover_checkpoint)
    prepare(paths, store.find(5))
    second = snapshot(paths.recover_checkpoint)
    prepare(paths, store.find(25))
    undo(paths)
    assert snapshot(paths.recover_checkpoint) == second
    undo(paths)
    assert snapshot(paths.recover_checkpoint) == first
    assert "is gone, as before" in undo(paths)
    assert snapshot(paths.checkpoints) == before
    with pytest.raises(StorageError, match="nothing is prepared"):
        undo(paths)


def test_what_was_replaced_long_ago_is_let_go(paths, store):
    for step in (5, 15, 25, 5, 15, 25):
        prepare(paths, store.find(step))
    assert len(hidden(paths)) == pending_restore.KEPT_UNDOS
    for step in (15, 5, 25):
        undo(paths)
        assert pending_restore.read_record(paths.recover_checkpoint).global_step == step
    assert "is gone" in undo(paths)


def test_what_somebody_else_put_there_is_kept_for_an_undo_and_never_removed_by_it(paths, store):
    shutil.copytree(store.find(5).path, paths.recover_checkpoint)
    foreign = snapshot(paths.recover_checkpoint)
    with pytest.raises(StorageError, match="not made by setup_recovery"):
        undo(paths)
    prepare(paths, store.find(15))
    undo(paths)
    assert snapshot(paths.recover_checkpoint) == foreign


@pytest.mark.parametrize("damage", [flip, truncate, lambda file: file.unlink()])
def test_a_torn_one_is_refused_and_nothing_changes(paths, store, damage):
    prepare(paths, store.find(5))
    damage(store.find(15).path / "training_state.tensors")
    before = snapshot(paths.checkpoints)
    with pytest.raises(CheckpointError, match=r"training_state\.tensors"):
        prepare(paths, store.find(15))
    assert snapshot(paths.checkpoints) == before


def test_one_of_another_run_is_refused(paths, store):
    reseal(store.find(15).path, config_fingerprint={"experiment_name": "another"})
    with pytest.raises(CheckpointError, match="experiment_name is 'another'"):
        prepare(paths, store.find(15))
    assert not paths.recover_checkpoint.exists()
    assert hidden(paths) == []


def test_where_there_are_no_links_the_bytes_are_copied(paths, store, tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(1, "not here")

    monkeypatch.setattr(os, "link", no_links)
    source = store.find(15).path
    (tmp_path / "copy").mkdir()
    how = copy_folder(source, tmp_path / "copy")
    assert how in (How.REFLINK, How.COPY)
    assert snapshot(tmp_path / "copy") == snapshot(source)
    assert (tmp_path / "copy" / "model.safetensors").stat().st_ino != (source / "model.safetensors").stat().st_ino


def test_a_full_disk_changes_nothing(paths, store, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    before = snapshot(paths.checkpoints)
    monkeypatch.setattr(pending_restore, "copy_folder", full)
    with pytest.raises(CheckpointError, match="No space left"):
        prepare(paths, store.find(15))
    assert snapshot(paths.checkpoints) == before


# ── the launch ──


@pytest.fixture
def trial(tmp_path, memory):
    """A run that has done its ten steps."""
    trial = Trial(tmp_path, steps=10)
    assert trial.run()
    return trial


def journal_of(trial):
    return Journal(trial.paths.events, 2, time.time)


def go_back(trial, step, **how):
    prepare(trial.paths, trial.store.find(step), **how)
    found = find_prepared(trial.config, trial.paths)
    return take(found, trial.paths, journal_of(trial))


def steps_of(store):
    return [checkpoint.global_step for checkpoint in store.list()]


@pytest.mark.slow
def test_a_run_that_goes_back_ends_bit_for_bit_as_the_one_that_did_not(trial, tmp_path):
    assert steps_of(trial.store) == [3, 7, 9]
    weights = trial.weights()
    taken = go_back(trial, 3)
    assert (taken.global_step, steps_of(trial.store)) == (3, [3])
    again = Trial(tmp_path, steps=10, resume=True)
    assert again.loop.next_step == 4
    assert again.run()
    identical(again.weights(), weights)
    assert [report.global_step for report in again.reports] == [4, 5, 6, 7, 8, 9]


@pytest.mark.slow
def test_what_is_in_memory_does_not_bring_it_forward_again(trial):
    states = InMemoryCheckpoints(trial.paths)
    assert [state.global_step for state in states.current(trial.store.list())] == [8, 9]
    go_back(trial, 3)
    facts = CheckpointCatalog.of_run(trial.config, trial.paths).facts(-1)
    assert choose(facts, None, (), trial.config.restore).global_step == 3
    assert states.newest_complete(trial.store.list()) is None


@pytest.mark.slow
def test_it_is_taken_once(trial):
    go_back(trial, 3)
    assert not trial.paths.recover_checkpoint.exists()
    assert hidden(trial.paths) == []
    assert find_prepared(trial.config, trial.paths) is None
    (event,) = trial.events("recovery.taken")
    assert event["global_step"] == 3
    assert len(event["set_aside"]) == 2


@pytest.mark.slow
def test_a_link_that_a_person_made_is_taken_once_too(trial):
    """The launch ended with "Cannot call rmtree on a symbolic link", and so did each later setup_recovery."""
    trial.paths.recover_checkpoint.symlink_to(trial.store.find(3).path)
    taken = take(find_prepared(trial.config, trial.paths), trial.paths, journal_of(trial))
    assert (taken.global_step, steps_of(trial.store)) == (3, [3])
    assert find_prepared(trial.config, trial.paths) is None
    assert hidden(trial.paths) == []


@pytest.mark.slow
def test_checkpoints_that_hold_damage_are_condemned_and_the_others_only_set_aside(trial):
    go_back(trial, 3, first_damaged=8)
    aside = sorted(path.name for path in (trial.store.root / "set_aside").iterdir())
    assert [name.partition(".")[2] for name in aside] == ["superseded-1", "condemned-1"]


@pytest.mark.slow
def test_one_that_retention_has_removed_since_comes_back_from_the_copy(trial):
    original = content(trial.store.find(3).path)
    prepare(trial.paths, trial.store.find(3))
    shutil.rmtree(trial.store.find(3).path)
    taken = take(find_prepared(trial.config, trial.paths), trial.paths, journal_of(trial))
    assert trial.store.verify(taken) == ()
    found = content(taken.path)
    assert {**found, "manifest.json": None} == {**original, "manifest.json": None}
    assert json.loads(found["manifest.json"])["files"] == json.loads(original["manifest.json"])["files"]


@pytest.mark.slow
def test_a_checkpoint_of_the_same_step_from_another_branch_makes_way(trial):
    prepare(trial.paths, trial.store.find(7))
    wanted = trial.store.find(7).manifest.files
    folder = trial.store.find(7).path
    state = json.loads((folder / "position.json").read_text())
    (folder / "position.json").unlink()  # its inode is the copy's too
    state["position"]["recent_rewards"] = [1.0]
    (folder / "position.json").write_text(json.dumps(state))
    reseal(folder)
    taken = take(find_prepared(trial.config, trial.paths), trial.paths, journal_of(trial))
    assert taken.manifest.files == wanted
    assert steps_of(trial.store) == [3, 7]


@pytest.mark.slow
def test_a_launch_that_is_killed_while_it_takes_takes_again(trial, monkeypatch):
    prepare(trial.paths, trial.store.find(3))

    def killed(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pending_restore, "_remove", killed)
        with pytest.raises(KeyboardInterrupt):
            take(find_prepared(trial.config, trial.paths), trial.paths, journal_of(trial))
    assert trial.paths.recover_checkpoint.is_dir()
    taken = take(find_prepared(trial.config, trial.paths), trial.paths, journal_of(trial))
    assert (taken.global_step, steps_of(trial.store)) == (3, [3])


def test_a_torn_one_stops_the_launch_and_names_the_way_out(tmp_path, memory):
    trial = Trial(tmp_path, steps=5)
    trial.run()
    prepare(trial.paths, trial.store.find(3))
    (trial.paths.recover_checkpoint / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"not complete: .*model\.safetensors is missing") as caught:
        find_prepared(trial.config, trial.paths)
    assert "--undo" in caught.value.hint


def test_other_settings_and_mode_off_are_refused(tmp_path, memory):
    trial = Trial(tmp_path, steps=5)
    trial.run()
    prepare(trial.paths, trial.store.find(3))
    trial.config.gconfig.n_samples = 99
    with pytest.raises(ConfigError, match=r"gconfig\.n_samples was 3, is 99"):
        find_prepared(trial.config, trial.paths)
    trial.config.recover.mode = "off"
    with pytest.raises(ConfigError, match=r"recover\.mode=off"):
        find_prepared(trial.config, trial.paths)


def test_a_finished_run_that_was_set_back_is_not_finished(tmp_path, memory):
    trial = Trial(tmp_path, steps=5)
    trial.run()
    facts = {"total_train_steps": 5, "total_train_epochs": 5}
    journal_of(trial).record("run.finished", reason="all steps", **facts)
    assert "FINISHED" in already_finished(trial.config, trial.paths)
    go_back(trial, 3)
    assert already_finished(trial.config, trial.paths) == ""
