"""Another project's trainer of two ranks, begun by torchrun: whichever of them is lost or stopped, all of it is begun
again, and no process stays."""

import contextlib
import json
import os
import shutil
import signal
import sys

import psutil
import pytest

from tests.support.foreign.foreign_run import ROOT, ForeignRun

pytestmark = pytest.mark.timeout(900)

PROGRAM = ROOT / "tests" / "programs" / "ranked_trainer.py"
RANKS, STEPS = 2, 60
FAULTS = [(8, 1, signal.SIGKILL), (18, 0, signal.SIGKILL), (28, 1, signal.SIGSTOP), (38, 0, signal.SIGSTOP)]
"""The step in which each is done, to which rank."""
SETTINGS = (
    *("trainer.metrics=log.jsonl", "trainer.checkpoints='out/step-*'", "trainer.checkpoint_file=state.json"),
    *("trainer.resume='--resume *'", "+trainer.env.OMP_NUM_THREADS=1", "health.trainer_silence_s=3"),
)


def ranks_of(run):
    """The pid of each rank, by its number."""
    found = {}
    for pid in run.tree():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if PROGRAM.name in process.cmdline()[1:3] and (rank := process.environ().get("RANK")):
                found[int(rank)] = pid
    return found if len(found) == RANKS else None


def undisturbed():
    weight = 1
    for step in range(1, STEPS + 1):
        weight = (weight * sum(range(1, RANKS + 1)) + step) % 1_000_003
    return weight


@pytest.mark.parametrize(
    "faults", [FAULTS[::3], pytest.param(FAULTS, marks=pytest.mark.long)], ids=["one of each", "each of both"]
)
def test_whichever_rank_is_killed_or_stopped_all_are_begun_again_and_no_step_is_lost(tmp_path, faults):
    shutil.copy(PROGRAM, tmp_path)
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node {RANKS}"
    command = f"{torchrun} {PROGRAM.name} --steps {STEPS} --metrics log.jsonl"
    with ForeignRun(tmp_path, command, *SETTINGS) as run:
        for number, (step, rank, how) in enumerate(faults, 1):
            run.wait_steps(step)
            before, pids = run.tree(), run.wait_until(lambda: ranks_of(run), "both ranks run")
            os.kill(pids[rank], how)
            run.wait_until(lambda number=number: len(run.incidents()) == number, f"it steps again after {how.name}")
            assert not {*before} & {*run.tree()}, "nothing of the tree before is left"
        assert run.wait_end() == 0, run.said()
        assert run.tree() == []
    causes = {signal.SIGKILL: "trainer_crash", signal.SIGSTOP: "trainer_hang"}
    assert run.incidents() == [(causes[how], True) for *_, how in faults]
    assert run.steps() == list(range(1, STEPS + 1))
    state = json.loads((tmp_path / "out" / f"step-{STEPS}" / "state.json").read_text())
    assert state["weight"] == undisturbed()
