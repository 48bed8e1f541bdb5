"""A trainer that finds no memory within a step has not taken the step, and its next life takes it once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launcher.base.messages import Cause
from launcher.checkpoints import in_memory_checkpoints
from launcher.policy.exit_cause import RanOut, find_trainer_cause
from tests.support.machine import scaled
from tests.support.worlds.training import Trial, identical

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[4]
STEPS = 9
MOMENTS = [("forward", 6), ("backward", 6), ("optimizer", 0)]
NO_MEMORY = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"


@pytest.fixture(autouse=True)
def states_in_memory_are_below_the_test_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(in_memory_checkpoints, "MEMORY_BACKED", tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    root = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_memory_checkpoints, "MEMORY_BACKED", root)
        trial = Trial(root, steps=STEPS)
        assert trial.run()
    return trial.weights()


@pytest.fixture(scope="module")
def starved(tmp_path_factory):
    """The folder with what each starved loop left, by the moment."""
    root = tmp_path_factory.mktemp("starved")
    moments = [str(word) for moment in MOMENTS for word in moment]
    subprocess.run(
        [sys.executable, "-m", "tests.programs.starved_loop", str(root), str(STEPS), *moments],
        cwd=REPOSITORY,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=scaled(120),
    )
    return root


@pytest.mark.parametrize(("moment", "step"), MOMENTS)
def test_an_allocation_that_fails_within_a_step_costs_nothing_but_time(starved, undisturbed, monkeypatch, moment, step):
    """Step 0 for the optimizer: it makes its moments in its first step, and asks for nothing after that."""
    left = starved / moment
    monkeypatch.setattr(in_memory_checkpoints, "MEMORY_BACKED", left)
    found = find_trainer_cause((left / "ended").read_text().splitlines(), None)
    assert (found.cause, found.ran_out) == (Cause.TRAINER_OOM, RanOut.TRAINER_HOST)
    again = Trial(left, steps=STEPS, resume=step > 0)
    assert again.loop.next_step in {0, 4, step}, "a save under the same want of memory may fail"
    assert again.run()
    identical(again.weights(), undisturbed)


def test_an_optimizer_step_that_was_half_taken_is_in_no_checkpoint(tmp_path, undisturbed, monkeypatch):
    step = torch.optim.AdamW.step
    trial = Trial(tmp_path, steps=STEPS, memory=False)

    def half(optimizer):
        if trial.loop.next_step < 6:
            return step(optimizer)
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].add_(1.0)
        raise RuntimeError(NO_MEMORY)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", half)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            trial.run()
    assert [checkpoint.global_step for checkpoint in trial.store.list()] == [3]
    again = Trial(tmp_path, steps=STEPS, resume=True)
    assert again.run()
    identical(again.weights(), undisturbed)


def test_a_step_whose_lines_could_not_be_written_is_in_a_checkpoint_that_has_them(tmp_path):
    """Else a resume would go on behind it, and the ledger would never have it."""
    trial = Trial(tmp_path, steps=STEPS)

    def refuse(report, batch):
        if report.global_step == 6:
            raise MemoryError
        trial.reports.append(report)

    trial.loop._record = refuse
    with pytest.raises(MemoryError):
        trial.run()
    again = Trial(tmp_path, steps=STEPS, resume=True)
    assert (again.loop.next_step, again.restored.last.global_step) == (7, 6)
    assert not {*again.restored.last.prompt_ids} & {*trial.reports[-1].prompt_ids}


@pytest.mark.parametrize("meets", [RuntimeError("can't start new thread"), MemoryError()])
def test_what_a_last_save_meets_does_not_hide_why_the_loop_ended(tmp_path, monkeypatch, meets):
    def publish(version):
        if version == 6:
            raise RuntimeError(NO_MEMORY)

    trial = Trial(tmp_path, steps=STEPS, publish=publish)

    def save(*_, **__):
        raise meets

    monkeypatch.setattr(trial.loop, "_save", lambda: None if trial.loop.next_step < 6 else save())
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        trial.run()
    assert trial.events("checkpoint.failed")[-1]["reason"] == f"{type(meets).__name__}: {meets}"
