"""States in memory: whole or passed over, only this run's, only beside the checkpoints that they were kept beside."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from actors.model.stored_tensors import DoubleBuffer, TensorRows, overwrite_tensors
from launcher.base.errors import CheckpointError, ConfigError, DiskError
from launcher.checkpoints import in_memory_checkpoints
from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoints
from launcher.checkpoints.manifest import record_of
from launcher.checkpoints.resume_decision import resume_point
from launcher.run_files.journal import append_line
from tests.support.checkpoint_makers import flip
from tests.support.worlds.checkpoints import Run

pytestmark = pytest.mark.usefixtures("memory")


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")


def test_the_older_of_two_slots_is_overwritten(run):
    assert run.current() == []
    assert run.newest_complete() is None
    folders = [run.keep(step) for step in range(5)]
    assert run.current() == [3, 4]
    assert folders[0] == folders[2] == folders[4] != folders[1] == folders[3]
    run.states.begin(2)  # and killed there
    assert run.current() == [4]


def test_a_state_of_before_which_says_more_is_read_and_one_that_says_less_is_none(run):
    manifest = run.keep(4) / "manifest.json"
    content = json.loads(manifest.read_text())
    content["facts"] |= {"epoch": 0, "epoch_step": 4, "policy_version": 5}
    manifest.write_text(json.dumps(content))
    assert run.current() == [4]
    del content["facts"]["base"]
    manifest.write_text(json.dumps(content))
    assert run.current() == []


def test_with_room_for_one_there_is_one(run):
    run.keep(0, slots=1)
    run.keep(1, slots=1)
    assert run.current() == [1]


@pytest.mark.parametrize("harm", [flip, lambda path: path.write_bytes(b""), lambda path: path.unlink()])
def test_a_damaged_state_is_passed_over_for_the_older_one(run, harm):
    run.keep(7)
    folder = run.keep(8)
    harm(folder / "tensors")
    assert run.newest_complete() == 7
    newest = run.states.current(())[-1]
    with pytest.raises(CheckpointError, match=str(folder / "tensors")):
        newest.verify()
    harm(folder / "manifest.json")
    assert run.newest_complete() == 7


def test_the_last_write_of_a_killed_incarnation_costs_one_state_and_never_gives_a_wrong_one(run):
    """The kernel may end it after the successor has begun, or another rank may not have ended yet."""
    run.keep(7)
    kept = run.keep(8)
    slot = run.states.begin(2)
    command = [sys.executable, "-m", "tests.programs.late_writer", str(slot / "tensors"), "late" * 200]
    with subprocess.Popen(command) as late:
        try:
            assert os.WIFSTOPPED(os.waitpid(late.pid, os.WUNTRACED)[1])
            assert run.again().newest_complete() == 8, "the successor goes on from the slot that is not written to"
            assert run.keep(9) == slot
            assert run.newest_complete() == 9
        finally:
            late.send_signal(signal.SIGCONT)
        assert late.wait() == 0
    assert (slot / "tensors").read_bytes().count(b"late") == 100, "it was written over what the successor has kept"
    assert run.current() == [8, 9]
    assert run.again().newest_complete() == 8
    assert json.loads((kept / "tensors").read_text())["step"] == 8
    with pytest.raises(CheckpointError, match=str(slot / "tensors")):
        run.states.current(())[-1].verify()


def test_a_state_that_can_not_be_dropped_is_a_fault_of_the_disk(run, monkeypatch):
    """It was a bare OSError, which whoever goes back does not expect: it ended the trainer's process."""
    run.keep(7)

    def refused(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(DiskError, match="the state after step 7 in memory stays"):
        run.states.drop_after(6)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_state_of_the_version_before_is_read(run, is_whole):
    """A run that was upgraded between two attempts resumed from its newest checkpoint, some steps earlier."""
    folder = run.keep(8)
    told = json.loads((folder / "manifest.json").read_text())
    data = (folder / "tensors").read_bytes()
    told |= {"format": "grpo-memory-state/1", "files": {"tensors": {"bytes": len(data), "crc32": zlib.crc32(data)}}}
    (folder / "manifest.json").write_text(json.dumps(told))
    if not is_whole:
        flip(folder / "tensors")
    assert run.newest_complete() == (8 if is_whole else None)


def test_states_of_another_run_of_the_same_name_do_not_count(run, tmp_path):
    run.keep(3)
    shutil.rmtree(tmp_path / "run")
    again = Run(tmp_path / "run")
    assert again.current() == []
    assert resume_point(again.config, again.paths) is None


def test_a_step_that_another_machine_has_undone_does_not_come_back(run):
    """The run was killed at step 100 here, went on from its checkpoint elsewhere, and is here again: of 96 and 97 the
    ledger would have had the one's lines, and the weights the other's steps."""
    run.save(95)
    for step in (99, 100):
        run.step(step, attempt=1)
    for step in (96, 97):
        append_line(run.paths.ledger, {"global_step": step, "attempt": 2})
    assert run.current() == []
    assert run.facts() == [(95, False)]
    assert resume_point(run.config, run.paths).global_step == 95
    for step in (98, 99, 100):
        append_line(run.paths.ledger, {"global_step": step, "attempt": 2})
    assert run.again().current() == []


@pytest.mark.parametrize("has_line", [True, False])
def test_the_states_of_an_attempt_that_went_on_here_count(run, has_line):
    run.save(95)
    run.step(99, attempt=1)
    run.step(100, attempt=1, has_line=has_line)
    assert run.current() == [99, 100]
    if not has_line:
        append_line(run.paths.ledger, {"global_step": 100, "attempt": 1})  # as the trainer does that goes on from it
    run.step(101, attempt=2)
    assert run.again().current() == [100, 101]


def test_a_retaken_step_counts_before_its_line_is_written(run):
    run.save(60)
    for step in (61, 62):
        run.step(step, attempt=1)
    run.states.drop_after(60)
    run.step(61, attempt=2, has_line=False)
    assert run.current() == [61]


def test_whoever_removes_the_newest_checkpoint_goes_back_to_the_one_before(run):
    run.save(19)
    run.save(39)
    run.keep(44)
    assert run.current() == [44]
    shutil.rmtree(run.store.list()[-1].path)
    assert run.current() == []
    assert resume_point(run.config, run.paths).global_step == 19


def test_a_checkpoint_that_is_torn_does_not_take_the_state_beside_it_away(run):
    run.save(19)
    run.keep(24)
    newest = run.store.list()[-1].path
    (newest / "manifest.json").write_bytes(b"{")
    (newest / "model.safetensors").write_bytes(b"wei")
    assert resume_point(run.config, run.paths).global_step == 24


def test_a_resume_takes_the_newer_of_disk_and_memory(run):
    run.save(19)
    run.keep(18)
    assert resume_point(run.config, run.paths).path.name.endswith("globalstep19")
    run.keep(20)
    assert str(resume_point(run.config, run.paths)) == "the state after step 20 in memory"
    run.config.recover.memory = False
    assert resume_point(run.config, run.paths).global_step == 19


def test_the_rules_of_a_resume_are_those_of_a_checkpoint(run):
    folder = run.keep(5)
    run.config.gconfig.n_samples = 4
    with pytest.raises(ConfigError, match=r"step 5 in memory was made with other settings: gconfig.n_samples was 2"):
        resume_point(run.config, run.paths)
    run.config.recover.mode = "off"
    with pytest.raises(ConfigError, match=f"recover.mode=off, but {folder}"):
        resume_point(run.config, run.paths)


def test_the_choice_sees_a_state_where_the_disk_does_not_hold_its_step(run):
    run.save(19)
    run.keep(18)
    run.keep(19)
    assert run.facts() == [(19, False), (18, True)]
    run.keep(20)
    run.keep(21)
    assert run.facts() == [(19, False), (20, True), (21, True)]
    catalog = CheckpointCatalog.of_run(run.config, run.paths)
    assert catalog.newest_model({}).global_step == 19
    assert catalog.condemn_after(20) == ()
    assert run.facts() == [(19, False), (20, True)]
    with pytest.raises(TimeoutError):
        catalog.condemn_after(18, lambda: True)
    assert run.facts() == [(19, False), (20, True)], "given up before the disk answered"
    over = iter([False, True])
    with pytest.raises(CheckpointError):
        catalog.condemn_after(18, lambda: next(over))
    assert [step for step, _ in run.facts()] == [19], "given up between the states in memory and the checkpoints"
    assert catalog.condemn_after(18) == ("epoch0epochstep19globalstep19.condemned-1",)
    assert run.facts() == []
    run.keep(19)
    run.config.recover.memory = False
    assert run.facts() == []


def test_how_many_fit(run, tiny_disk, monkeypatch):
    monkeypatch.setattr(in_memory_checkpoints, "MEMORY_BACKED", tiny_disk.path)
    states = InMemoryCheckpoints(run.paths)
    assert [states.slots_that_fit(kib * 1024, 2**40) for kib in (10, 300, 600)] == [2, 1, 0]
    states.root.mkdir()
    (states.root / "filling").write_bytes(b"x" * 300 * 1024)
    assert states.slots_that_fit(200 * 1024, 2**40) == 2, "what lies there already makes room"


@pytest.mark.parametrize("at_once", [None, 1, 8, 84, 1000])
def test_a_smaller_file_of_tensors_over_a_larger_one_is_whole(tmp_path, at_once):
    """`at_once`: bytes of each half of the buffer through which a GPU's tensors come, here in ordinary memory."""
    buffer = None if at_once is None else DoubleBuffer(at_once, is_pinned=False)
    path = tmp_path / "state.tensors"
    large = {"w": torch.randn(7, 3), "random": torch.arange(5, dtype=torch.uint8), "flag": torch.tensor(2.5)}
    for tensors in (large, {"w": torch.randn(2).t(), "none": torch.zeros(0)}):
        pieces = {name: TensorRows.of(tensor) for name, tensor in tensors.items()}
        part = overwrite_tensors(path, pieces, buffer=buffer)
        assert part.as_file == record_of(path) == record_of(path, [part])
        found = load_file(path)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
