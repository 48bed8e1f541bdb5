"""What the step loop keeps in memory after each step, what it owes after a restore from there, and what it costs not
to have the room."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch

from actors.data.prompt_queue import PromptQueue
from actors.model import learner
from actors.training import checkpointing
from actors.training.checkpointing import Checkpointer
from actors.training.step_memory import StepMemory
from actors.training.step_records import StepRecords
from launcher.base.errors import CheckpointError, DataError, DiskError, TrainerError
from launcher.base.messages import StepReport
from launcher.checkpoints import in_memory_checkpoints, manifest
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoints
from launcher.checkpoints.verification import Verification, verify
from launcher.config.schema import RunConfig
from launcher.run_files.journal import Journal, current_lines, read_lines
from launcher.run_files.run_paths import RunPaths
from tests.support.worlds.training import Trial, identical


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(in_memory_checkpoints, "MEMORY_BACKED", folder)
    return folder


class Ended(Exception):
    pass


def trial_that_ends(root, version, **how):
    """Stands before the state of that version was kept, or after (`publish` is right before)."""

    def publish(published):
        if published == version:
            raise Ended

    return Trial(root, publish=publish, **how)


def states(trial):
    return InMemoryCheckpoints(trial.paths)


def newest(trial):
    return states(trial).current(trial.store.list())[-1]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
def test_each_step_is_kept_and_the_same_process_goes_back_to_it(tmp_path):
    whole = Trial(tmp_path / "whole", steps=7)
    whole.run()
    trial = Trial(tmp_path / "back", steps=7)
    assert trial.run()
    assert [state.global_step for state in states(trial).current(trial.store.list())] == [5, 6]
    restored = trial.loop._checkpointer.load_step(5)
    assert restored.last == trial.reports[5]
    assert restored.position.next_step == 6
    trial.loop.restore(restored.position)
    assert trial.run()
    identical(trial.weights(), whole.weights())
    identical(trial.training_state(), whole.training_state())


@pytest.mark.slow
def test_a_damaged_state_counts_no_more_and_the_older_one_serves(tmp_path):
    trial = Trial(tmp_path, steps=7)
    trial.run()
    name = "epoch1epochstep1globalstep6"
    (trial.store.root / name).rename(trial.store.root / f"gone.{name}")
    checkpointer = trial.loop._checkpointer
    flip(newest(trial).path / "training_state.tensors")
    with pytest.raises(CheckpointError, match="step 6"):
        checkpointer.load_step(6)
    assert "training_state.tensors was changed" in trial.events("state.damaged")[0]["reason"]
    assert newest(trial).global_step == 5
    assert checkpointer.load_step(5).position.next_step == 6


def test_a_state_of_another_data_set_or_seed_is_not_damaged_and_stays(tmp_path):
    """It was dropped, and every checkpoint was called damaged: the run began anew."""
    trial = Trial(tmp_path, steps=7)
    trial.run()
    other = PromptQueue([f"new {index}" for index in range(len(trial.queue))], seed=0, shuffle=True)
    with pytest.raises(DataError, match=r"the data set, its order or the seed is not the checkpoint's: .*fingerprint"):
        Checkpointer(trial.config, trial.paths, Journal(trial.paths.events, 1), trial.model, other).load_step(6)
    assert newest(trial).global_step == 6
    assert trial.events("state.damaged") == []
    restored = trial.loop._checkpointer.load_step(6)
    assert restored.last == trial.reports[6]


def test_a_state_that_can_not_be_read_now_stays(tmp_path):
    """It was dropped, and the steps since the last checkpoint were lost with it."""
    trial = Trial(tmp_path, steps=6)
    trial.run()
    trial.store.set_aside_after(3)
    refused = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    with patch.object(manifest, "checksum_of", side_effect=refused), pytest.raises(DiskError):
        trial.loop._checkpointer.load_step(4)
    assert trial.events("state.damaged") == []
    assert trial.loop._checkpointer.load_step(4).last == trial.reports[4]


def test_a_checkpoint_that_can_not_be_read_now_is_gone_back_to_later(tmp_path, monkeypatch):
    trial = Trial(tmp_path, steps=7, memory=False)
    trial.run()
    opened, lasts = Path.open, [True]

    def refused(path, *args, **kwargs):
        if lasts[0] and path.is_relative_to(trial.store.root):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(DiskError, match="Stale file handle"):
        trial.loop._checkpointer.load_step(6)
    lasts[0] = False
    assert trial.loop._checkpointer.load_step(6).position.next_step == 7


def test_one_that_can_never_be_read_keeps_no_later_one_from_being_saved(tmp_path, monkeypatch):
    """A bad sector under the manifest of the only checkpoint."""
    trial = Trial(tmp_path, steps=7, memory=False)
    opened, bad = Path.open, trial.store.root / "epoch0epochstep3globalstep3"

    def refused(path, *args, **kwargs):
        if path.parent == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refused)
    trial.run()
    assert [(one.global_step, str(one.state)) for one in trial.store.list()] == [(3, "DAMAGED"), (6, "COMMITTED")]


def test_a_disk_that_is_back_within_the_look_costs_no_checkpoint(tmp_path):
    trial = Trial(tmp_path, steps=7, memory=False)
    trial.run()
    lost = Verification(trial.store.root, problems=["model.safetensors can't be read: Connection timed out"])
    looks = iter([lost])
    with patch.object(checkpointing, "verify", side_effect=lambda folder: next(looks, None) or verify(folder)):
        assert trial.loop._checkpointer.load_step(6).position.next_step == 7


def test_a_damaged_state_of_a_step_that_the_disk_has_is_no_loss(tmp_path):
    trial = Trial(tmp_path, steps=7)
    trial.run()
    flip(newest(trial).path / "position.json")
    restored = trial.loop._checkpointer.load_step(6)
    assert (restored.position.next_step, restored.is_from_memory) == (7, False)
    assert restored.last == trial.reports[6]


def test_what_was_due_after_the_last_step_is_done_after_a_restore(tmp_path):
    trial = Trial(tmp_path, steps=7)
    save = trial.loop._checkpointer.save
    trial.loop._checkpointer.save = lambda *_: (_ for _ in ()).throw(Ended)
    with pytest.raises(Ended):
        trial.run()
    assert newest(trial).global_step == 3, "the checkpoint that was due after it is not on the disk"
    trial.loop._checkpointer.save = save
    restored = trial.loop._checkpointer.load_step(3)
    trial.loop.restore(restored.position)
    assert trial.run()
    assert [checkpoint.global_step for checkpoint in trial.store.list()] == [3, 6]


def test_a_step_is_written_down_whatever_became_of_its_weights(tmp_path):
    trial = trial_that_ends(tmp_path, version=6)
    with pytest.raises(Ended):
        trial.run()
    assert [report.global_step for report in trial.reports] == list(range(6))
    assert (newest(trial).global_step, newest(trial).facts.attempt) == (5, 1)
    saved = trial.store.list()[-1]
    assert (saved.global_step, saved.manifest.policy_version) == (5, 6)


def test_without_room_the_run_goes_on_and_says_what_it_needs(tmp_path, tiny_disk, monkeypatch):
    monkeypatch.setattr(in_memory_checkpoints, "MEMORY_BACKED", tiny_disk.path)
    trial = Trial(tmp_path, steps=6)
    assert trial.run()
    (event,) = trial.events("state.no_room")
    assert f"need 10 MiB in {tiny_disk.path}; none is kept" in event["reason"]
    assert not states(trial).root.exists()


ALLOCATOR = "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (MemoryError(), "MemoryError"),
        (
            RuntimeError(f"{ALLOCATOR} allocate 8 bytes.\nframe #0: c10"),
            f"RuntimeError: {ALLOCATOR} allocate 8 bytes. frame #0: c10",
        ),
        (torch.OutOfMemoryError("CUDA out of memory."), "OutOfMemoryError: CUDA out of memory."),
    ],
    ids=["disk", "Python's memory", "torch's memory", "a GPU's memory"],
)
def test_a_state_that_can_not_be_written_costs_one_event_until_it_can_again(tmp_path, monkeypatch, error, said):
    """A want of memory while the state was written ended the trainer."""
    overwrite, failed = learner.overwrite_tensors, []

    def refuse(path, pieces, **options):
        if path.is_relative_to(states(trial).root) and len(trial.reports) in (2, 3, 5):
            failed.append(path)
            path.write_bytes(b"half")
            raise error
        return overwrite(path, pieces, **options)

    monkeypatch.setattr(learner, "overwrite_tensors", refuse)
    trial = Trial(tmp_path, steps=6)
    assert trial.run()
    assert len(failed) == 3
    events = trial.events("state.failed")
    assert [event["global_step"] for event in events] == [2, 5]
    assert all(event["reason"].endswith(f": {said}") for event in events)
    assert [report.global_step for report in trial.reports] == list(range(6))
    assert newest(trial).global_step == 4


class Unwritable:
    """In the place of a Checkpointer, with a model whose state can't be written."""

    def __init__(self, root, error):
        config = RunConfig(experiment_name="kept")
        config.cluster.fileroot = str(root)
        self.paths = RunPaths.of(config)
        self.paths.prepare()
        journal = Journal(self.paths.events, 1)
        self._memory = StepMemory(config, self.paths, journal)
        self._model = Mock(**{"state_bytes.return_value": 1, "write_state.side_effect": error})
        self._newest = None
        self.recorded = []

    def keep(self):
        state = SimpleNamespace(training=None, name=SimpleNamespace(global_step=3))
        Checkpointer._keep(self, state, lambda: self.recorded.append(3))

    def reasons(self):
        return [line["reason"] for line in read_lines(self.paths.events) if line["event"] == "state.failed"]


def test_a_defect_while_a_state_is_written_is_named_by_its_kind_and_its_trace_is_logged(tmp_path, caplog):
    """It passed for want of memory, as "'weight'"."""
    trial = Unwritable(tmp_path, KeyError("weight"))
    trial.keep()
    trial.keep()
    (reason,) = trial.reasons()
    assert reason.endswith(": KeyError: 'weight'")
    (logged,) = (one for one in caplog.records if one.name == "states")
    assert logged.exc_info[1].args == ("weight",)
    assert trial.recorded == [3, 3], "the step was taken all the same"


def test_a_rank_that_is_lost_while_a_state_is_written_is_not_the_state_s_failure(tmp_path):
    trial = Unwritable(tmp_path, TrainerError("trainer rank 1 is lost"))
    with pytest.raises(TrainerError, match="rank 1 is lost"):
        trial.keep()
    assert (trial.recorded, trial.reasons()) == ([], [])


@pytest.mark.slow
def test_switched_off_nothing_is_kept_and_what_was_kept_goes(tmp_path):
    trial = Trial(tmp_path, steps=6)
    assert trial.run()
    assert states(trial).root.exists()
    trial.config.recover.memory = False
    off = Trial(tmp_path, steps=8, memory=False)
    restored = off.loop._checkpointer.load_step(5)
    assert not restored.is_from_memory
    off.loop.restore(restored.position)
    assert off.run()
    assert not states(off).root.exists()


@pytest.mark.slow
def test_a_trainer_that_ends_with_its_last_step_on_the_disk_leaves_nothing_in_memory(tmp_path):
    trial = Trial(tmp_path, steps=6)
    trial.run()
    trial.loop.forget()
    assert not states(trial).root.exists()
    broken = Trial(tmp_path / "full", steps=7)
    broken.loop._checkpointer.save = lambda *_: None
    broken.run()
    broken.loop.forget()
    assert newest(broken).global_step == 6, "the disk does not hold it"


def report(step, *, attempt=1, at=1.0, prompts=("a",)):
    return StepReport(
        global_step=step,
        epoch=0,
        epoch_step=step,
        attempt=attempt,
        policy_version=step + 1,
        time=at,
        prompt_ids=prompts,
        weight_versions=(step,),
        rollouts_failed=0,
        rollouts_retried=0,
        metrics={"rollout/reward": 0.5},
    )


def numbers(path):
    return [line["global_step"] for line in read_lines(path)]


def test_lines_that_a_kill_kept_back_are_written_once(tmp_path):
    paths = Trial(tmp_path, steps=1).paths
    records = StepRecords(paths)
    records.write(report(0))
    records.complete(report(0))
    assert numbers(paths.ledger) == numbers(paths.metrics) == [0]
    records.complete(report(1, at=2.0))
    assert numbers(paths.ledger) == numbers(paths.metrics) == [0, 1]
    with paths.ledger.open("a") as file:  # killed between the two files
        file.write(json.dumps(report(2, at=3.0).ledger_line()) + "\n")
    records.complete(report(2, at=3.0))
    assert numbers(paths.ledger) == numbers(paths.metrics) == [0, 1, 2]


def test_the_line_of_a_branch_that_was_thrown_away_is_not_taken_for_it(tmp_path):
    paths = Trial(tmp_path, steps=1).paths
    records = StepRecords(paths)
    for step in range(6):
        records.write(report(step, at=float(step), prompts=("old",)))
    records.complete(report(3, at=9.0, prompts=("new",)))
    standing = current_lines(read_lines(paths.ledger))
    assert [(line["global_step"], line["prompt_ids"]) for line in standing][-1] == (3, ["new"])
    assert current_lines(read_lines(paths.metrics))[-1]["time"] == 9.0


def test_lines_of_a_step_that_was_undone_are_not_written_again(tmp_path):
    """A person has gone back to it: it is among the lines already, and what was taken since is no step of its."""
    paths = Trial(tmp_path, steps=1).paths
    records = StepRecords(paths)
    for step in range(6):
        records.write(report(step, at=float(step), prompts=(f"old {step}",)))
    for step in (3, 4):
        records.write(report(step, at=9.0 + step, prompts=(f"new {step}",)))
    records.complete(report(5, at=5.0, prompts=("old 5",)))
    assert numbers(paths.ledger) == numbers(paths.metrics) == [0, 1, 2, 3, 4, 5, 3, 4]


def test_a_checkpoint_of_before_has_no_lines_and_is_gone_back_to(tmp_path):
    trial = Trial(tmp_path, steps=4, memory=False)
    assert trial.run()
    path = trial.store.list()[-1].path
    content = json.loads((path / "position.json").read_text())
    del content["report"]
    (path / "position.json").write_text(json.dumps(content))
    restored = trial.loop._checkpointer.load(path)
    assert (restored.position.next_step, restored.last) == (4, None)
