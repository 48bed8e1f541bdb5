"""Transcripts: what the Coordinator does when this is seen, and that its successor goes on where it was killed."""

import asyncio
import time

import pytest

from actors.supervision.coordinator import QUIET_TURN_S, TURN_S
from launcher.base.messages import Cause, Incident, ServerExit, ServerState, TerminalStatus
from launcher.policy.actions import (
    AdmitServer,
    Halt,
    LoadWeights,
    PauseTrainer,
    RestartServer,
    RestartTrainer,
    RestoreTrainer,
    ResumeTrainer,
)
from launcher.policy.checkpoint_status import CheckpointFacts, CheckpointStatus
from launcher.policy.observed import RunState
from launcher.policy.restart_budget import RepairAttempt, Rung
from launcher.policy.standstill import longest_standstill_s
from tests.support.run_memory import history_of
from tests.support.simulated_run.run_model import CONFIG
from tests.support.worlds.supervision import Trial, collapsed, restored_unheard

RESTORED_TO_19 = RepairAttempt(
    at=900.0, cause=Cause.REWARD_COLLAPSE, subject="trainer", rung=Rung.RESTORE, onset_step=45, restored_step=19
)


async def test_a_run_begins_with_weights_before_traffic_and_traffic_before_steps(tmp_path):
    trial = Trial(tmp_path)
    trial.history.begin()
    await trial.hands.begin()
    await trial.turns()
    kinds = [type(action) for action in trial.did()]
    assert kinds == [RestoreTrainer, AdmitServer, AdmitServer, ResumeTrainer]
    assert trial.history.state is RunState.RUNNING
    assert trial.history.attempts == [], "a start is no repair, and no checkpoint was seen to be damaged"
    assert trial.events("repair.begun") == []
    (running,) = trial.events("run.running")
    assert running["reason"] == "the trainer takes step 0; server-0, server-1 serve"


async def test_a_first_load_that_fails_is_counted_from_then_on_so_that_it_can_not_go_on(tmp_path):
    trial = Trial(tmp_path)
    trial.history.begin()
    await trial.hands.begin()
    trial.hands.fails[RestoreTrainer] = 2
    await trial.turns(20)
    loads = [one.rung for one in trial.history.attempts if one.cause is Cause.CHECKPOINT_CORRUPT]
    assert loads == [Rung.RETRY] * 2, "the second and the third"
    assert len(trial.events("trainer.restoring")) == 3
    assert trial.history.state is RunState.RUNNING


async def test_the_checkpoints_are_read_for_a_plan_that_needs_them_and_for_no_other(tmp_path):
    trial = await Trial(tmp_path).begun()
    for _ in range(3):
        trial.run.step(1)
        await trial.turns(2)
    trial.run.kill_server("server-1")
    await trial.turns()
    assert trial.did(RestartServer), "at the beginning"
    assert trial.hands.reads == 1, "at the beginning"
    trial.run.checkpoints = (CheckpointFacts(global_step=2, status=CheckpointStatus.CANDIDATE),)
    trial.run.kill_trainer()
    await trial.turns()
    assert [action.global_step for action in trial.did(RestoreTrainer)] == [2]
    assert trial.hands.reads == 2


async def test_while_the_checkpoints_can_not_be_read_nothing_is_restored_and_the_rest_is_repaired(tmp_path):
    """Taken for a run that has none, it would begin anew (P2, P4)."""
    trial = await Trial(tmp_path).begun()
    trial.run.step(9)
    trial.run.checkpoints = None
    trial.run.kill_trainer()
    trial.run.kill_server("server-1")
    await trial.turns()
    assert {type(action) for action in trial.did()} == {RestartTrainer, RestartServer}
    assert trial.history.state is RunState.RESTORING
    trial.run.checkpoints = (CheckpointFacts(global_step=8, status=CheckpointStatus.CANDIDATE),)
    await trial.turns()
    assert [action.global_step for action in trial.did(RestoreTrainer)] == [8]
    assert trial.history.state is RunState.RUNNING


async def test_a_run_without_a_doubt_is_looked_at_less_often(tmp_path):
    trial = await Trial(tmp_path).begun()
    quiet = await trial.coordinator.turn() - trial.run.now
    trial.run.kill_server("server-1")
    assert (quiet, await trial.coordinator.turn() - trial.run.now) == pytest.approx((QUIET_TURN_S, TURN_S))


async def test_an_action_past_its_deadline_is_given_up_and_holds_up_nobody(tmp_path):
    trial = await Trial(tmp_path).begun()
    trial.hands.hangs.add(RestartServer)
    trial.run.kill_server("server-0")
    trial.run.now += 1.0
    trial.hands.patience_s = 0.0
    await trial.coordinator.turn()
    while not trial.events("server.restarting_failed"):
        await asyncio.sleep(0)
    trial.hands.hangs.clear()
    await trial.turns()
    assert "not done within 0 s" in trial.events("server.restarting_failed")[0]["reason"]
    assert trial.run.servers["server-0"].state is ServerState.READY


async def test_the_loop_itself_runs_to_the_end_and_returns_the_word(tmp_path):
    trial = Trial(tmp_path)
    trial.run.now = time.monotonic()
    running = asyncio.create_task(trial.coordinator.run())
    while trial.run.trainer.is_paused:
        await asyncio.sleep(0)
    trial.run.step(5)
    trial.run.train(is_finished=True)
    trial.hands.changed.set()
    outcome = await running
    assert (outcome.status, outcome.last_step, outcome.reason) == (TerminalStatus.FINISHED, 4, "all steps are done")


# ── a Coordinator that is killed ──


@pytest.mark.parametrize("kills", [1, 2])
async def test_a_restore_that_never_reached_the_trainer_is_not_counted_twice(tmp_path, kills):
    """Two such kills ended the run: "3 times: restoring does not help", after one collapse; one went further back."""
    trial = collapsed(await Trial(tmp_path).begun())
    for _ in range(kills):
        trial.hands.hangs.add(RestoreTrainer)
        await trial.turns(6)
        assert len(trial.did(RestoreTrainer)) == 1
        trial = Trial(tmp_path, trial.run)
        await trial.hands.begin()
    await trial.turns()
    assert [action.global_step for action in trial.did(RestoreTrainer)] == [19]
    assert sum(one.restored_step == 19 for one in trial.history.attempts) == 1
    assert history_of(trial.path, 1).attempts == trial.history.attempts
    assert trial.history.state is RunState.RUNNING


@pytest.mark.parametrize("kills", [1, 2])
async def test_a_restore_in_which_the_trainer_died_too_is_no_second_collapse_at_the_same_place(tmp_path, kills):
    """One such kill went further back than needed, two ended the run: "3 times: restoring does not help"."""
    trial = collapsed(await Trial(tmp_path).begun())
    for _ in range(kills):
        trial.hands.hangs.add(RestoreTrainer)
        await trial.turns(12)
        assert len(trial.did(RestoreTrainer)) == 1
        trial.run.kill_trainer()
        trial = Trial(tmp_path, trial.run)
        await trial.hands.begin()
    await trial.turns(60)
    assert [action.global_step for action in trial.did(RestoreTrainer)] == [19]
    assert trial.history.state is RunState.RUNNING


async def test_a_trainer_that_dies_later_leaves_the_restore_that_succeeded_in_the_count(tmp_path):
    """The Coordinator that ordered it was killed before it heard of the success."""
    after = await restored_unheard(tmp_path)
    await after.turns(6)
    after.run.step(2)
    after.run.kill_trainer()
    after.run.train(lineage=0)  # what takes its place is empty
    await after.turns()
    assert after.did(RestartTrainer)
    assert [one.restored_step for one in after.history.attempts if one.onset_step is not None] == [19]


async def test_a_restore_that_the_trainer_carried_out_though_its_coordinator_was_killed_counts(tmp_path):
    after = await restored_unheard(tmp_path)
    await after.turns()
    assert after.did(RestoreTrainer) == []
    assert sum(one.restored_step == 19 for one in after.history.attempts) == 1


async def test_a_successor_of_one_that_was_killed_while_it_halted_puts_back_what_was_set_aside(tmp_path):
    """Else what the run had learned would stay set aside: the halt that goes on would not know of it (P12)."""
    before = await Trial(tmp_path).begun()
    before.hands.hangs.add(Halt)
    before.history.attempted(RESTORED_TO_19)
    before.run.train(next_step=20, policy_version=20)
    before.run.incident = Incident(
        cause=Cause.OUTSIDE_WEIGHTS, subject="environment", reason="0.01, and earned 0.86", since=before.run.now
    )
    await before.turns(3)
    assert [action.reinstate_after for action in before.did(Halt)] == [19]
    after = Trial(tmp_path, before.run)
    after.run.incident = None  # the monitor was released meanwhile
    await after.hands.begin()
    await after.turns()
    assert [action.reinstate_after for action in after.did(Halt)] == [19]
    assert after.history.state is RunState.ERRORED


async def test_servers_that_died_before_one_look_get_their_incidents_in_the_order_of_their_numbers(tmp_path):
    """Their deaths have taken numbers already, and not in the order in which the plan names the servers."""
    trial = await Trial(tmp_path).begun()
    for name in ("server-1", "server-0"):
        end = ServerExit(name=name, generation=0, pid=7, exit_code=-9, reason="killed", age_s=0.1)
        trial.history.server_died(end)
        trial.run.kill_server(name)
    await trial.turns(1)
    began = trial.events("incident.began")
    assert [(event["incident"], event["subject"]) for event in began] == [(1, "server-1"), (2, "server-0")]


async def test_what_failed_long_ago_no_longer_delays_what_fails_now(tmp_path):
    trial, load, waits = Trial(tmp_path), LoadWeights(name="s0", version=1, lineage=1), []
    for after_s in (0.0, 1.0, 2.0, CONFIG.restart.window_s + 1.0):
        trial.run.now += after_s
        trial.coordinator._failed(load, "it died while it loaded", trial.run.now)
        rests = trial.coordinator._observe(await trial.hands.observe_run()).not_before
        waits.extend(not_before - trial.run.now for not_before in rests.values())
    assert [wait / CONFIG.restart.wait_initial_s for wait in waits] == [1, 2, 4, 1]


async def test_a_run_that_takes_no_step_and_nobody_knows_why_is_said(tmp_path):
    trial = await Trial(tmp_path).begun()
    for _ in range(5):
        trial.run.step(1)
        await trial.turns(2)
    await trial.turns(int(CONFIG.health.trainer_min_s) - 3)
    assert not trial.events("step.late")
    await trial.turns(5)
    (late,) = trial.events("step.late")
    assert late["reason"] == "no step for 60 s, usually one takes 2.0 s, and no cause is known"
    assert trial.did() == [], "nothing is repaired for it"
    trial.run.step(1)
    await trial.turns(2)
    assert [event["reason"] for event in trial.events("step.came")] == ["a step came after 64 s"]


async def test_a_person_s_restore_is_done_once_however_late_its_file_was_read(tmp_path):
    """It may have been read a moment before it was removed; another pause, and a restore that failed, followed."""
    trial = await Trial(tmp_path).begun()
    trial.run.step(20)
    asked = RestoreTrainer(global_step=9, reason="a person asked", restore_count=1)
    trial.coordinator.restore(asked)
    await trial.turns(6)
    kinds = [type(action) for action in trial.did()]
    assert kinds == [PauseTrainer, RestoreTrainer, LoadWeights, LoadWeights, ResumeTrainer]
    assert (trial.did(RestoreTrainer), trial.run.trainer.next_step) == ([asked], 10)
    assert trial.history.state is RunState.RUNNING
    assert {one.subject for one in trial.history.attempts} == {"server-0", "server-1"}, "no budget pays for the restore"
    trial.hands.done.clear()
    trial.coordinator.restore(asked)
    await trial.turns(3)
    assert trial.did() == []
    trial.coordinator.restore(RestoreTrainer(global_step=4, reason="a person asked", restore_count=2))
    await trial.turns(3)
    assert trial.run.trainer.next_step == 5


@pytest.mark.parametrize("stuck", [AdmitServer, ResumeTrainer])
async def test_an_order_that_never_succeeds_ends_the_attempt_and_not_the_night(tmp_path, stuck):
    """No budget counts it: the servers, or the trainer, waited for it for ever, and nobody was told."""
    trial = await Trial(tmp_path).begun()
    trial.hands.fails[stuck] = 10**9
    trial.run.kill_server("server-0")
    trial.run.kill_server("server-1")
    trial.run.kill_trainer()
    limit_s, died_at = longest_standstill_s(CONFIG), trial.run.now
    while trial.history.state is not RunState.ERRORED and trial.run.now < died_at + 2 * limit_s:
        await trial.turns(50)
    assert trial.history.state is RunState.ERRORED
    assert limit_s < trial.run.now - died_at < limit_s + 100
    memory = trial.history.memory
    assert memory.ending_may_pass, "the next attempt starts everything anew"
    assert f"failed, or not done by then: {stuck.__name__}" in memory.ending_reason
