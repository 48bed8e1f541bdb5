"""restore.json: asked for at once or not at all, taken back until the run takes it, and done once, bit for bit."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from launcher.base.errors import CheckpointError, ConfigError, DiskError, StorageError
from launcher.checkpoints import restore_request
from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog
from launcher.checkpoints.checkpoint_folder import list_folder
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoints
from launcher.checkpoints.restore_request import (
    ask_restore,
    asked_checkpoint,
    finish_restore,
    go_back,
    pending_restore,
    read_request,
    take_restore,
    withdraw_restore,
)
from launcher.checkpoints.resume_decision import already_finished, resume_point
from launcher.policy.restore import choose
from launcher.run_files.journal import Journal, read_events
from tests.programs.killed_restore import Victim
from tests.programs.killed_saver import CALLS
from tests.support.checkpoint_makers import snapshot
from tests.support.worlds.checkpoints import Run, lose_manifest, steps_of, truncate
from tests.support.worlds.training import Trial, identical


@pytest.fixture
def run(tmp_path):
    """Checkpoints of the steps 3, 5, 7 and 9, of one line each."""
    run = Run(tmp_path / "root")
    for step in (3, 5, 7, 9):
        run.save(step)
    return run


def ask(run, step, condemn_after=None):
    return ask_restore(run.paths, run.store.find(step), why="a person asked", condemn_after=condemn_after)


def take(run):
    return take_restore(run.paths, Journal(run.paths.events, 2, time.time))


def taken_events(paths):
    return [event for event in read_events(paths.events) if event["event"] == "recovery.taken"]


def aside(run):
    folder = run.store.root / "set_aside"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def restore_files(paths):
    return sorted(path.name for path in paths.checkpoints.iterdir() if path.name.startswith("restore"))


# ── asking, and taking back ──


def test_it_is_one_small_file_and_nothing_else_changes(run):
    before = snapshot(run.paths.fileroot)
    request = ask(run, 5, condemn_after=6)
    after = snapshot(run.paths.fileroot)
    (name,) = after.keys() - before.keys()
    assert name.endswith("/restore.json")
    assert {**after, name: None} == {**before, name: None}
    written = json.loads(run.paths.restore.read_text())
    assert written.keys() == {"step", "made_at", "restore_count", "why", "condemn_after", "asked_at"}
    assert (written["step"], written["condemn_after"], written["restore_count"]) == (5, 6, 1)
    assert read_request(run.paths) == request


def test_asked_again_the_later_counts(run):
    ask(run, 5)
    assert ask(run, 7).restore_count == 2
    assert take(run).global_step == 7
    assert steps_of(run.store) == [3, 5, 7]
    assert restore_files(run.paths) == []


def test_asked_again_while_it_is_taken_the_later_follows(run):
    ask(run, 7)
    taken = go_back(run.paths)
    ask(run, 3)
    Journal(run.paths.events, 2, time.time).record("recovery.taken", **taken.facts)
    finish_restore(run.paths)
    assert pending_restore(run.paths).step == 3, "the first was done, and this one was not"
    assert take(run).global_step == 3
    assert [event["restore_count"] for event in taken_events(run.paths)] == [1, 2]


def test_taken_back_until_the_run_takes_it(run):
    before = snapshot(run.paths.fileroot)
    ask(run, 5)
    assert withdraw_restore(run.paths) == "nothing is set up"
    assert snapshot(run.paths.fileroot) == before
    with pytest.raises(StorageError, match="nothing is set up"):
        withdraw_restore(run.paths)
    ask(run, 5)
    go_back(run.paths)
    with pytest.raises(StorageError, match="going back to step 5 already") as caught:
        withdraw_restore(run.paths)
    assert "another restore" in caught.value.hint
    ask(run, 3)
    assert withdraw_restore(run.paths) == "the run is going back to step 5, as asked before"
    take(run)
    with pytest.raises(StorageError, match="nothing is set up") as caught:
        withdraw_restore(run.paths)
    assert "undone by another restore" in caught.value.hint


def test_another_restore_is_the_way_back(run):
    """What the first set aside comes back, not what was trained in its place."""
    nine, path = run.store.find(9).manifest, run.store.find(9).path.name
    ask(run, 5)
    take(run)
    run.save(9)
    (lying,) = (one for one in run.store.root.glob(f"set_aside/{path}.*"))
    (wanted,) = (one for one in list_folder(lying.parent) if one.global_step == 9)
    ask_restore(run.paths, wanted, why="", condemn_after=None)
    assert take(run).manifest == nine
    assert run.store.find(9).manifest == nine
    assert steps_of(run.store) == [3, 5, 9]
    assert len(aside(run)) == 2, "step 7, and the later step 9"
    assert taken_events(run.paths)[1]["set_aside"] == [f"{path}.superseded-2"]


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_full_disk_changes_nothing(run, monkeypatch, call):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    ask(run, 5)
    before = snapshot(run.paths.fileroot)
    monkeypatch.setattr(os, call, full)
    monkeypatch.setattr(Path, "rename", full if call == "rename" else Path.rename)
    with pytest.raises(CheckpointError, match=r"restore\.json was not written: No space left") as caught:
        ask(run, 7)
    monkeypatch.undo()
    assert "room" in caught.value.hint
    assert snapshot(run.paths.fileroot) == before


# ── the launch ──


def test_it_is_taken_once(run):
    ask(run, 5)
    assert str(resume_point(run.config, run.paths)) == "epoch0epochstep5globalstep5"
    assert take(run).global_step == 5
    assert steps_of(run.store) == [3, 5]
    assert restore_files(run.paths) == []
    assert asked_checkpoint(run.paths) is None
    run.save(6)
    assert take(run) is None
    assert steps_of(run.store) == [3, 5, 6]
    (event,) = taken_events(run.paths)
    assert (event["global_step"], event["reason"], len(event["set_aside"])) == (5, "a person asked", 2)


def test_an_order_that_was_given_up_sets_nothing_aside_when_the_disk_answers_again(run, monkeypatch):
    """Its thread can't be stopped: it set aside what had been trained on since another order was carried out."""
    before = steps_of(run.store)
    restore_request.ask_restore(run.paths, run.store.find(before[-2]), why="x", condemn_after=None)
    verified, given_up = restore_request._verified, []

    def stalled(paths, request):
        """While it is looked at, the order is given up, carried out anew, and a step is saved."""
        found = verified(paths, request)
        monkeypatch.setattr(restore_request, "_verified", verified)
        given_up.append(True)
        restore_request.take_restore(paths, Journal(paths.events, 2, time.time))
        run.save(before[-1])
        return found

    monkeypatch.setattr(restore_request, "_verified", stalled)
    with pytest.raises(TimeoutError):
        restore_request.go_back(run.paths, lambda: bool(given_up))
    assert steps_of(run.store) == before


def test_checkpoints_that_hold_damage_are_condemned_and_the_others_only_set_aside(run):
    ask(run, 5, condemn_after=7)
    take(run)
    assert [name.partition(".")[2] for name in aside(run)] == ["superseded-1", "condemned-1"]


def test_what_is_in_memory_does_not_bring_it_forward_again(tmp_path):
    """The states of steps 5 and 6 are based on step 3, which stays."""
    run = Run(tmp_path / "root")
    run.save(3)
    run.keep(5)
    run.keep(6)
    run.save(5)
    run.save(7)
    assert run.current() == [5, 6]
    ask(run, 5)
    take(run)
    facts = CheckpointCatalog.of_run(run.config, run.paths).facts(-1)
    assert choose(facts, None, (), run.config.restore).global_step == 5
    assert run.current() == []


def test_one_that_was_done_and_whose_file_came_back_is_not_done_again(run):
    """As after a crash of the machine, whose disk had the journal's line and not the removal."""
    ask(run, 5)
    content = run.paths.restore.read_bytes()
    take(run)
    run.save(6)
    run.paths.restore_taking.write_bytes(content)
    assert str(resume_point(run.config, run.paths)) == "epoch0epochstep6globalstep6"
    assert take(run) is None
    assert steps_of(run.store) == [3, 5, 6]
    assert restore_files(run.paths) == []
    assert len(taken_events(run.paths)) == 1


def flip(path):
    (path / "model.safetensors").write_bytes(b"Weights")


@pytest.mark.parametrize("damage", [flip, truncate, lose_manifest, shutil.rmtree])
def test_a_damaged_one_stops_the_launch_and_names_the_way_out(run, damage):
    ask(run, 5)
    damage(run.store.find(5).path)
    before = snapshot(run.paths.fileroot)
    with pytest.raises(ConfigError, match=r"restore\.json: ") as caught:
        resume_point(run.config, run.paths)
    assert "--undo" in caught.value.hint
    with pytest.raises(CheckpointError):
        go_back(run.paths)
    assert snapshot(run.paths.fileroot).keys() ^ before.keys() == {
        str(path.relative_to(run.paths.fileroot)) for path in (run.paths.restore, run.paths.restore_taking)
    }, "nothing was moved but the request itself"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"step": 5}', b'{"step": "x"}'])
def test_a_request_that_can_not_be_read_is_one_message_and_can_be_replaced(run, content):
    run.paths.restore.write_bytes(content)
    with pytest.raises(StorageError, match=r"restore\.json can't be read") as caught:
        resume_point(run.config, run.paths)
    assert "remove it" in caught.value.hint
    ask(run, 5)
    assert take(run).global_step == 5


def test_a_request_of_the_earlier_form_is_refused_and_kept(run):
    shutil.copytree(run.store.find(5).path, run.paths.recover_checkpoint)
    before = snapshot(run.paths.fileroot)
    with pytest.raises(ConfigError, match="recover_checkpoint is a restore that an earlier version set up") as caught:
        resume_point(run.config, run.paths)
    assert "move that folder away" in caught.value.hint
    lengths = {"total_train_steps": run.config.total_train_steps, "total_train_epochs": run.config.total_train_epochs}
    Journal(run.paths.events, 1, time.time).record("run.finished", reason="all steps", **lengths)
    assert already_finished(run.config, run.paths) == "", "else the launch would end well, and not refuse"
    before[str(run.paths.events.relative_to(run.paths.fileroot))] = run.paths.events.read_bytes()
    assert snapshot(run.paths.fileroot) == before


def test_other_settings_and_mode_off_are_refused(run):
    ask(run, 5)
    run.config.gconfig.n_samples = 99
    with pytest.raises(ConfigError, match=r"gconfig\.n_samples was 2, is 99"):
        resume_point(run.config, run.paths)
    run.config.recover.mode = "off"
    with pytest.raises(ConfigError, match=r"recover\.mode=off"):
        resume_point(run.config, run.paths)
    assert restore_files(run.paths) == ["restore.json"]


def test_a_finished_run_that_is_to_go_back_is_not_finished(run):
    lengths = {"total_train_steps": run.config.total_train_steps, "total_train_epochs": run.config.total_train_epochs}
    Journal(run.paths.events, 1, time.time).record("run.finished", reason="all steps", **lengths)
    assert "FINISHED" in already_finished(run.config, run.paths)
    ask(run, 5)
    assert already_finished(run.config, run.paths) == ""
    take(run)
    assert already_finished(run.config, run.paths) == ""


def test_a_disk_that_does_not_give_the_checkpoint_refuses_nothing_for_good(run, monkeypatch):
    ask(run, 5)

    def away(path):
        raise DiskError("the disk is away")

    def torn(path):
        raise CheckpointError("it can't be read")

    with monkeypatch.context() as patched:
        patched.setattr(restore_request, "verify_checkpoint", torn)
        patched.setattr(restore_request, "refuse_unread", away)
        with pytest.raises(DiskError):
            go_back(run.paths)
    assert steps_of(run.store) == [3, 5, 7, 9]
    assert take(run).global_step == 5


@pytest.mark.slow
def test_a_run_that_goes_back_ends_bit_for_bit_as_the_one_that_did_not(tmp_path, memory):
    trial = Trial(tmp_path, steps=10)
    assert trial.run()
    assert steps_of(trial.store) == [3, 7, 9]
    weights = trial.weights()
    ask(trial, 3)
    assert take(trial).global_step == 3
    assert InMemoryCheckpoints(trial.paths).newest_complete(trial.store.list()) is None
    again = Trial(tmp_path, steps=10, resume=True)
    assert again.loop.next_step == 4
    assert again.run()
    identical(again.weights(), weights)
    assert [report.global_step for report in again.reports] == [4, 5, 6, 7, 8, 9]


@pytest.mark.slow
def test_retention_removes_nothing_while_the_run_is_asked_to_go_back(tmp_path, memory):
    """The run saves before it goes back, and with that save it removed what it was to go back to."""
    trial = Trial(tmp_path, steps=10)
    assert trial.run()
    ask(trial, 3)
    assert Trial(tmp_path, steps=20, resume=True).run()
    assert steps_of(trial.store)[:2] == [3, 7]
    assert take(trial).global_step == 3


# ── killed ──


@pytest.fixture
def killed_before_each_call(run, tmp_path):
    """Yields a copy of the run for each system call of what is done, killed there."""
    victim = Victim()

    def kills(what):
        shutil.copytree(run.paths.fileroot, tmp_path / "whole")
        calls = victim.does(what, tmp_path / "whole")
        assert calls.keys() >= {"rename", "fsync"} if what != "undo" else calls.keys() >= {"unlink", "fsync"}
        for number in range(1, sum(calls.values()) + 1):
            root = tmp_path / f"{what}-{number}"
            shutil.copytree(run.paths.fileroot, root)
            seen = victim.does(what, root, number)
            assert sum(seen.values()) == number, "it was killed before that call"
            yield Run(root)
        print(f"killed before each of {sum(calls.values())} system calls: {calls}")

    yield kills
    victim.close()


needs_traces = pytest.mark.skipif(not CALLS, reason="the numbers of this processor's system calls are not known")


@pytest.mark.slow
@needs_traces
def test_asking_killed_at_each_call_to_the_file_system(run, killed_before_each_call):
    """Step 7 was asked for before; the process asks for step 5."""
    ask(run, 7)
    steps = []
    for one in killed_before_each_call("ask"):
        steps.append(pending_restore(one.paths).step)
        assert steps_of(one.store) == [3, 5, 7, 9]
        assert ask(one, 3).restore_count >= 2
        assert take(one).global_step == 3
        assert len(taken_events(one.paths)) == 1
    assert steps == sorted(steps, reverse=True)
    assert {*steps} == {7, 5}


@pytest.mark.slow
@needs_traces
@pytest.mark.parametrize("from_aside", [False, True])
def test_going_back_killed_at_each_call_to_the_file_system(run, killed_before_each_call, from_aside):
    if from_aside:
        ask(run, 3)
        take(run)
        run.save(5)
        run.save(8)
        wanted = next(one for one in list_folder(run.store.root / "set_aside") if one.global_step == 5)
    else:
        wanted = run.store.find(5)
    ask_restore(run.paths, wanted, why="a person asked", condemn_after=7)
    n = 2 if from_aside else 1
    for one in killed_before_each_call("take"):
        take(one)
        assert steps_of(one.store) == [3, 5]
        assert one.store.find(5).manifest == wanted.manifest
        assert restore_files(one.paths) == []
        assert [event["restore_count"] for event in taken_events(one.paths)] == [*range(1, n + 1)]
        lying = [name.partition(".")[0].rpartition("globalstep")[2] for name in aside(one)]
        assert lying == (["5", "7", "8", "9"] if from_aside else ["7", "9"]), "none is lost, none is there twice"
        one.save(6)
        assert take(one) is None, "not done again"


@pytest.mark.slow
@needs_traces
def test_taking_back_killed_at_each_call_to_the_file_system(run, killed_before_each_call):
    ask(run, 5)
    left = []
    for one in killed_before_each_call("undo"):
        left.append(pending_restore(one.paths) is not None)
        assert steps_of(one.store) == [3, 5, 7, 9]
        assert ask(one, 3).restore_count >= 1
    assert left == sorted(left, reverse=True)
