"""The step loop where a disk refuses a checkpoint or a line: it stops, and does first what was refused."""

import errno
import threading
from pathlib import Path

from actors.model.policy_model import PolicyModel
from actors.training.step_records import StepRecords
from launcher.base.disk_faults import DiskFault, Refusal, fault_of_file
from launcher.base.errors import DiskError, JournalError
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.run_files.journal import read_lines
from launcher.run_files.run_paths import RunPaths
from tests.support.machine import scaled
from tests.support.worlds.training import Trial


def test_a_full_disk_at_a_save_stops_the_loop_which_saves_when_it_may_go_on(tmp_path, monkeypatch):
    trial = Trial(tmp_path, steps=9)
    refused = []

    def refuse(self, folder, state=None):
        if self.policy_version >= 4 and len(refused) < 2:
            refused.append(folder)
            (Path(folder) / "model.safetensors").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return save(self, folder, state)

    save = PolicyModel.save
    monkeypatch.setattr(PolicyModel, "save", refuse)
    assert not trial.run()
    refusal = trial.loop.refusal
    assert (refusal.fault, refusal.path) == (DiskFault.FULL, str(trial.store.root))
    stopped = trial.loop.next_step
    assert 4 <= stopped <= 8, "once the writer has met it: at the latest at the next save"
    assert not trial.store.list(), "once the writer has met it: at the latest at the next save"
    trial.loop.allow()
    assert not trial.run(), "it is still full"
    assert trial.loop.next_step == stopped, "no step is taken before the save"
    trial.loop.allow()
    assert trial.run()
    assert trial.loop.refusal is None
    assert [event["global_step"] for event in trial.events("checkpoint.failed")] == [3, stopped - 1]
    assert trial.events("checkpoint.committed")[0]["global_step"] == stopped - 1
    assert [c.global_step for c in trial.store.list()][-2:] == [7, 8]
    assert not any(trial.store.root.glob(".staging*"))


def test_a_full_disk_at_the_last_save_is_waited_for(tmp_path, monkeypatch):
    trial, full, save = Trial(tmp_path, steps=3), [True], PolicyModel.save

    def refuse(self, folder, state=None):
        if full and full.pop():
            raise OSError(28, "No space left on device")
        return save(self, folder, state)

    monkeypatch.setattr(PolicyModel, "save", refuse)
    assert not trial.run()
    assert trial.loop.next_step == 3
    trial.loop.allow()
    assert trial.run()
    assert [c.global_step for c in trial.store.list()] == [2]


def test_want_of_memory_for_the_copy_costs_a_checkpoint_and_not_the_run(tmp_path, monkeypatch):
    trial, starved, copied = Trial(tmp_path, steps=6), [True], PolicyModel.copy_to_host

    def copy(self, state, *, share):
        if starved and starved.pop():
            raise MemoryError
        return copied(self, state, share=share)

    monkeypatch.setattr(PolicyModel, "copy_to_host", copy)
    assert trial.run()
    assert [event["global_step"] for event in trial.events("checkpoint.failed")] == [3]
    assert [c.global_step for c in trial.store.list()] == [5]


def test_a_disk_that_refuses_a_checkpoint_s_folder_leaves_no_copy_in_memory(tmp_path, monkeypatch):
    """It stayed until the next checkpoint, and left less room for that one's."""

    def refuse(self, name):
        raise DiskError(f"{name} was not written", "make room") from OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CheckpointStore, "stage", refuse)
    trial = Trial(tmp_path, steps=6)
    assert not trial.run()
    trial.loop._checkpointer.settle()
    assert trial.model._learner._copy is None


def test_a_disk_that_refuses_a_step_s_lines_stops_the_loop_after_it(tmp_path):
    trial = Trial(tmp_path, steps=5)
    taken = trial.loop._record
    refusal = Refusal(path=str(tmp_path), fault=DiskFault.READ_ONLY, at=1.0)
    trial.loop._record = lambda report, batch: taken(report, batch) or (refusal if report.global_step == 1 else None)
    assert not trial.run()
    assert (trial.loop.refusal, trial.loop.next_step) == (refusal, 2)
    trial.loop.allow()
    assert trial.run()
    assert len(trial.reports) == 5


def test_a_checkpoint_of_a_step_whose_lines_the_disk_refused_brings_them(tmp_path):
    """A kill would leave the step out of the ledger for good."""
    trial = Trial(tmp_path, steps=5)
    records, is_begun, save = StepRecords(trial.paths), threading.Event(), trial.loop._checkpointer.save

    def record(report, batch):
        if report.global_step != 3:
            return records.write(report)
        assert is_begun.wait(scaled(60.0)), "a checkpoint of step 3 is due"
        return Refusal(path=str(tmp_path), fault=DiskFault.FULL, at=1.0)

    def begin(*given):
        save(*given)
        is_begun.set()

    trial.loop._record = record
    trial.loop._checkpointer.save = begin
    assert not trial.run()
    assert trial.loop.next_step == 4
    trial.loop._checkpointer.settle()
    assert steps_in(trial.paths.ledger) == steps_in(trial.paths.metrics) == [0, 1, 2]
    again = Trial(tmp_path, steps=5, resume=True, memory=False)
    assert again.loop.next_step == 4
    for _ in range(2):
        StepRecords(again.paths).complete(again.restored.last)
        assert steps_in(trial.paths.ledger) == steps_in(trial.paths.metrics) == [0, 1, 2, 3]


def test_a_checkpoint_that_was_due_when_the_disk_refused_a_step_s_lines_is_written_first_when_it_may_go_on(tmp_path):
    trial = Trial(tmp_path, steps=5, memory=False)
    taken = trial.loop._record
    refusal = Refusal(path=str(tmp_path), fault=DiskFault.FULL, at=1.0)
    trial.loop._record = lambda report, batch: taken(report, batch) or (refusal if report.global_step == 3 else None)
    assert not trial.run()
    assert trial.loop.next_step == 4
    assert not trial.store.list(), "the disk is not asked for more"
    trial.loop.allow()
    assert trial.run()
    assert [c.global_step for c in trial.store.list()] == [3, 4]


def steps_in(path):
    return [line["global_step"] for line in read_lines(path)]


def test_a_line_that_may_not_be_written_stops_the_loop_and_names_its_file(tmp_path):
    """Of a disk that is well, nothing was told: 170 steps were taken without their lines."""
    paths = RunPaths(fileroot=tmp_path, user="me", experiment_name="e", trial_name="t")
    paths.metrics.mkdir(parents=True)
    records = StepRecords(paths)
    records._metrics.append({"global_step": 0})
    refusal = records.refusal()
    assert (refusal.fault, refusal.path, refusal.file) == (DiskFault.REFUSED, str(paths.logs), str(paths.metrics))
    cause = JournalError("no")
    cause.__cause__ = OSError(errno.EMFILE, "Too many open files")
    assert fault_of_file(cause) is DiskFault.FAILED, "nobody refused it"
    paths.metrics.rmdir()
    assert records.refusal() is None
    assert [line["global_step"] for line in read_lines(paths.metrics)] == [0]
