"""How far a run got outlives whoever watched it: a repair that has not helped yet still counts, no other does."""

import time

import pytest

from actors.supervision.run_history import ProgressTracker, furthest_step
from launcher.base.messages import Cause
from launcher.config.schema import RunConfig
from launcher.policy.restart_budget import RepairAttempt, Rung, next_repair
from launcher.run_files.journal import append_line, read_lines
from tests.support.run_memory import history_of

RESTART = RunConfig(experiment_name="progress").restart


class Trial:
    """One run; `killed` is a Coordinator after the one before."""

    def __init__(self, folder):
        self.events = folder / "events.jsonl"
        self.metrics = folder / "metrics.jsonl"
        self.now = 1000.0
        self.killed()

    def killed(self):
        self.history = history_of(self.events, 1)
        self.book = ProgressTracker(self.history, furthest_step(self.metrics, 1))
        return self

    def steps(self, *steps, helpers=("server-0",)):
        for step in steps:
            append_line(self.metrics, {"global_step": step, "attempt": 1})
            self.look(step + 1, helpers)

    def look(self, next_step, helpers=("server-0",)):
        self.now += 1.0
        self.book.note(next_step, helpers, self.now)

    def repair(self, subject="trainer", cause=Cause.TRAINER_CRASH, rung=Rung.RESTORE):
        self.now += 1.0
        self.history.attempted(RepairAttempt(at=self.now, cause=cause, subject=subject, rung=rung))

    def next(self, subject="trainer", cause=Cause.TRAINER_CRASH):
        at = self.book.at(subject)
        repair = next_repair(cause, subject, self.history.attempts, RESTART, now=self.now, progress_at=at)
        return repair.reason.partition(": ")[2] if repair.rung is not Rung.HALT else "halt"

    def proofs(self):
        return [line["subject"] for line in read_lines(self.events) if line["event"] == "repair.proved"]


@pytest.fixture
def trial(tmp_path):
    return Trial(tmp_path)


def test_a_crash_that_takes_the_coordinator_along_each_time_ends_in_a_halt(trial):
    """Each successor found the run at a step and took that for progress: it would have gone on for ever."""
    trial.steps(*range(50))
    for _ in range(RESTART.restore):
        trial.repair()
        trial.killed().look(41)  # the restore
        trial.steps(*range(41, 50))
    assert trial.killed().next() == "halt"


def test_steps_taken_again_are_no_progress_for_a_successor_either(trial):
    trial.steps(*range(50))
    trial.repair()
    trial.killed().look(41)
    trial.steps(*range(41, 50))
    assert trial.next() == f"restore, 2 of {RESTART.restore}"
    trial.steps(50)
    assert trial.next() == f"restore, 1 of {RESTART.restore}"


def test_what_was_proved_stays_so_for_a_successor(trial):
    """Else a long run with a fault now and then would be ended for its length."""
    for step in range(0, 50, 5):
        trial.repair()
        trial.steps(*range(step, step + 5))
        trial.killed().look(step + 5)
        assert trial.next() == f"restore, 1 of {RESTART.restore}"


def test_others_refill_no_budget_of_a_server_before_and_after(trial):
    crash = Cause.SERVER_CRASH
    trial.steps(*range(5), helpers=("server-0", "server-1"))
    for step in range(5, 5 + RESTART.server):
        trial.repair("server-1", crash, Rung.SERVER)
        trial.steps(step)
        trial.killed().look(step + 1)
    assert trial.next("server-1", crash).startswith("halt")
    assert trial.next("server-0", crash).startswith("server, 1")


def test_a_proof_is_written_once_for_each_repair(trial):
    trial.steps(*range(100))
    assert trial.proofs() == []
    trial.repair()
    trial.steps(*range(100, 200))
    assert trial.proofs() == ["trainer"]


def test_the_steps_of_earlier_attempts_are_not_this_ones(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    assert furthest_step(metrics, 1) == 0
    for step in range(5000):
        append_line(metrics, {"global_step": step, "attempt": 1, "time": time.time(), "filling": "x" * 100})
    append_line(metrics, {"global_step": 30, "attempt": 2})
    assert (furthest_step(metrics, 1), furthest_step(metrics, 2)) == (5000, 31)
