"""What a Coordinator reads of its predecessor: the times of its repairs, whatever became of the wall clock."""

import dataclasses
import time

import pytest

from actors.supervision.run_history import RunHistory
from launcher.base.messages import Cause, Incident
from launcher.config.schema import RunConfig
from launcher.policy.actions import AbandonServer, Halt, RestoreTrainer
from launcher.policy.checkpoint_status import CheckpointFacts, CheckpointStatus
from launcher.policy.restart_budget import RepairAttempt, Rung, next_repair
from launcher.policy.restore import choose
from launcher.run_files.journal import Journal, read_lines

HOUR_S = 3600.0


@pytest.fixture
def journal(tmp_path):
    """Its wall clock may be set."""
    wall = [time.time()]
    written = Journal(tmp_path / "events.jsonl", 1, clock=lambda: wall[0])
    written.set_by = lambda seconds: wall.__setitem__(0, time.time() + seconds)
    return written


def restarted(journal, at):
    RunHistory(journal).attempted(RepairAttempt(at=at, cause=Cause.SERVER_CRASH, subject="server-0", rung=Rung.SERVER))


def test_a_successor_knows_the_words_of_each_failure_and_whether_the_halt_may_pass(journal):
    history = RunHistory(journal)
    told = RepairAttempt(at=1.0, cause=Cause.TRAINER_CRASH, subject="trainer", rung=Rung.RESTORE, told="KeyError: 'a'")
    history.attempted(told)
    history.begun(Halt(reason="again", may_pass=True))
    after = RunHistory.read(journal, journal.path, 1)
    assert after.attempts == [told]
    assert (after.ending_reason, after.ending_may_pass) == ("again", True)


def placed(journal, node):
    journal.record("coordinator.placed", subject="coordinator", node=node)


def read(journal, node="this"):
    return RunHistory.read(journal, journal.path, 1, clock=time.monotonic, node=node)


def test_a_load_of_the_state_is_not_called_a_damaged_checkpoint(journal):
    """Each start has one: it counts as a try in case it fails, and nothing is known to be damaged."""
    load = RepairAttempt(at=1.0, cause=Cause.CHECKPOINT_CORRUPT, subject="trainer", rung=Rung.RETRY)
    RunHistory(journal).attempted(load)
    (event,) = read_lines(journal.path)
    assert event["reason"] == "counts against the restart budget of checkpoint_corrupt (retry)"


@pytest.mark.parametrize("set_by_s", [HOUR_S, -HOUR_S])
def test_a_wall_clock_that_is_set_moves_no_repair(journal, set_by_s):
    """Set back by an hour, the next restart of a dead server waited for that hour."""
    journal.set_by(set_by_s)  # as it was when this was written: it has been set since
    placed(journal, "this")
    at = time.monotonic() - 5.0
    restarted(journal, at)
    history = read(journal)
    assert [attempt.at for attempt in history.attempts] == [at]
    settings = RunConfig(experiment_name="clock").restart
    now = time.monotonic()
    again = next_repair(Cause.SERVER_CRASH, "server-0", history.attempts, settings, now=now, progress_at=None)
    assert (again.rung, again.not_before) == (Rung.SERVER, at + settings.wait_initial_s)
    assert again.reason.endswith(f"2 of {settings.server}")


def test_times_of_another_machine_are_put_on_this_clock(journal):
    placed(journal, "other")
    restarted(journal, time.monotonic() + 10 * HOUR_S)
    placed(journal, "this")
    mine = time.monotonic()
    restarted(journal, mine)
    first, second = (attempt.at for attempt in read(journal).attempts)
    assert second == mine
    assert abs(first - mine) < HOUR_S


def test_a_restore_that_failed_is_no_collapse_after_one(journal):
    """Two damaged checkpoints and one collapse ended the run: "3 times: restoring does not help"."""
    placed(journal, "this")
    history = RunHistory(journal)
    collapse = Incident(cause=Cause.REWARD_COLLAPSE, subject="policy", reason="fell", since=1.0, onset_step=50)
    settings = RunConfig(experiment_name="e").restore
    for step in (39, 29):
        tried = RepairAttempt(
            at=1.0, cause=collapse.cause, subject="trainer", rung=Rung.RESTORE, onset_step=50, restored_step=step
        )
        history.attempted(tried)
        action = RestoreTrainer(global_step=step, reason="fell", onset_step=50)
        history.begun(action)
        history.failed(action, "a hash differs", 1.0)
    assert [one.restored_step for one in history.attempts] == [None, None]
    assert history.attempts == read(journal).attempts, "a successor knows the same"
    sound = CheckpointFacts(global_step=19, status=CheckpointStatus.GOOD)
    assert choose([sound], collapse, history.attempts, settings).global_step == 19
    history.attempted(dataclasses.replace(tried, restored_step=19))
    assert history.attempts[-1].restored_step == 19, "one that is under way counts"


@pytest.mark.parametrize("is_started_again", [True, False])
def test_a_server_that_was_given_up_and_then_restarted_with_the_fleet_is_no_longer_given_up(journal, is_started_again):
    """The next Coordinator took it for given up while it served, and ended it."""
    history = RunHistory(journal)
    history.started_server("server-0", 0, 0, 1)
    history.done(AbandonServer(name="server-0", reason="its restarts are spent"), {}, 0.1)
    if is_started_again:
        history.started_server("server-0", 1, 0, 1)
    expected = set() if is_started_again else {"server-0"}
    assert RunHistory.read(journal, journal.path, 1).abandoned == history.abandoned == expected
