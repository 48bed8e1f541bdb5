"""What a plan does for a trainer that was lost, and in which order it comes back."""

import dataclasses

import pytest

from launcher.base.messages import Cause
from launcher.policy.actions import (
    Halt,
    LoadWeights,
    PauseTrainer,
    RestartServer,
    RestartTrainer,
    RestoreTrainer,
    ResumeTrainer,
)
from launcher.policy.checkpoint_status import CheckpointFacts, CheckpointStatus
from launcher.policy.exit_cause import RanOut
from launcher.policy.observed import RunState
from launcher.policy.plan import UNJUDGED
from launcher.policy.restart_budget import Rung
from tests.support.simulated_run.looks import (
    BROKEN,
    COLLAPSE,
    CONFIG,
    MEMORY,
    NOW,
    PAUSED,
    T_CRASHED,
    T_OUT_OF_MEMORY,
    UNKNOWN,
    attempts,
    dead,
    decide,
    kinds,
    observed,
    server,
    trainer,
)


def test_the_life_of_a_lost_trainer():
    """T1: restarted → the newest checkpoint that stands → servers get its weights → resumed."""
    made = decide(observed(trainer=trainer(verdict=T_CRASHED)))
    assert kinds(made) == [RestartTrainer]
    assert made.state is RunState.RESTORING

    starting = trainer(verdict=UNKNOWN, is_loaded=False, is_paused=True)
    assert decide(observed(trainer=starting, state=made.state), made.attempts).actions == ()

    empty = trainer(is_loaded=False, is_paused=True)
    loading = decide(observed(trainer=empty, state=made.state), made.attempts)
    assert kinds(loading) == [RestoreTrainer]
    assert loading.actions[0].global_step == 39

    history = (*made.attempts, *loading.attempts)
    back = trainer(is_paused=True, policy_version=40, next_step=40, lineage=1)
    stale = decide(observed(trainer=back, state=made.state), history)
    assert stale.actions == (LoadWeights(name="s0", version=40, lineage=1),)
    assert stale.state is RunState.RESTORING

    current = server(weight_version=40, lineage=1)
    resuming = decide(observed(current, trainer=back, state=made.state), history)
    assert resuming.actions == (ResumeTrainer(),)
    going = dataclasses.replace(back, is_paused=False)
    assert decide(observed(current, trainer=going, state=resuming.state), history).state is RunState.RUNNING


def test_out_of_memory_where_nothing_may_give_way():
    config = dataclasses.replace(CONFIG, memory=dataclasses.replace(CONFIG.memory, give_way=False))
    lost = trainer(verdict=T_OUT_OF_MEMORY, ran_out=RanOut.TRAINER_DEVICE)
    made = decide(observed(trainer=lost), config=config)
    assert kinds(made) == [Halt]
    assert made.actions[0].reason.startswith("trainer_oom (trainer_device), and nothing may give way")
    assert kinds(decide(observed(trainer=trainer(verdict=T_CRASHED)), config=config)) == [RestartTrainer]


def test_servers_that_share_its_gpu_are_started_anew_to_make_room():
    """Their share is taken when they start: a smaller one in the settings alone frees nothing."""
    nothing_left = dataclasses.replace(
        MEMORY, max_tokens_per_mb=MEMORY.longest_sequence, gradient_checkpointing=True, on_gpu=True, shares_gpu=True
    )
    lost = trainer(verdict=T_OUT_OF_MEMORY, ran_out=RanOut.TRAINER_DEVICE)
    seen = dataclasses.replace(observed(server(0), server(1), trainer=lost), memory=nothing_left)
    made = decide(seen)
    assert kinds(made) == [RestartTrainer, RestartServer, RestartServer]
    assert made.actions[0].overrides.keys() == {"sglang.mem_fraction_static"}


def test_a_checkpoint_that_cannot_be_loaded_is_not_tried_for_ever():
    empty = trainer(is_loaded=False, is_paused=True)
    retries = attempts(*[Rung.RETRY] * CONFIG.restart.retry, cause=Cause.CHECKPOINT_CORRUPT, subject="trainer")
    assert kinds(decide(observed(trainer=empty), retries)) == [RestartTrainer]


def test_a_server_that_dies_while_the_trainer_recovers_is_mended_beside_it():
    """D1"""
    made = decide(observed(dead(0), server(1), trainer=trainer(verdict=T_CRASHED)))
    assert set(kinds(made)) == {RestartTrainer, RestartServer}
    assert made.state is RunState.RESTORING


def test_before_the_health_monitor_was_asked_nothing_is_loaded_nor_resumed_but_what_an_incident_asks_for():
    """There may be damage, and the newest checkpoint hold it."""
    empty = trainer(is_loaded=False, is_paused=True)
    assert decide(observed(trainer=empty, is_judged=False)).actions == ()
    back = decide(observed(trainer=empty, is_judged=False, incident=COLLAPSE)).actions
    assert [one.global_step for one in back if isinstance(one, RestoreTrainer)] == [19]
    held = decide(observed(trainer=PAUSED, is_judged=False))
    assert held.actions == ()
    assert UNJUDGED in held.reason
    assert kinds(decide(observed(trainer=PAUSED))) == [ResumeTrainer]


@pytest.mark.parametrize(("failed", "rungs"), [({}, []), ({(RestoreTrainer, ""): NOW - 1.0}, [Rung.RETRY])])
def test_a_load_is_counted_as_a_repair_only_after_one_that_failed(failed, rungs):
    """Each trainer that starts loads its state: counted too, sound starts would use up the tries of a broken one."""
    made = decide(observed(trainer=trainer(is_loaded=False, is_paused=True), not_before=failed))
    assert kinds(made) == [RestoreTrainer]
    assert [one.rung for one in made.attempts] == rungs


ASKED = RestoreTrainer(global_step=19, reason="a person asked", restore_count=1)


def test_a_person_s_restore_pauses_saves_and_goes_back_whatever_is_known():
    """The weights are saved, since another restore is the way back; what else the run would do of itself waits."""
    for incident in (None, COLLAPSE, BROKEN):
        made = decide(observed(asked_restore=ASKED, incident=incident))
        assert made.actions == (PauseTrainer(reason="a person asked", save=True),)
        made = decide(observed(trainer=PAUSED, asked_restore=ASKED, incident=incident))
        assert made.actions == (ASKED,)
        assert made.attempts == (), "it counts against no budget"
        assert made.state is RunState.RESTORING


def test_no_step_is_taken_before_a_person_s_restore_is_done():
    """Its request is still there: a launch would go back once more, and lose the step."""
    failed = {(RestoreTrainer, ""): NOW + 5}
    made = decide(observed(trainer=PAUSED, asked_restore=ASKED, not_before=failed))
    assert made.actions == ()
    assert made.wake_at == NOW + 5
    assert ResumeTrainer() in decide(observed(trainer=PAUSED, state=RunState.PAUSED)).actions


def test_a_lost_trainer_loads_its_newest_before_a_person_s_restore():
    """A server that starts meanwhile starts from the newest: of another of that version it would pass for current."""
    assert kinds(decide(observed(trainer=trainer(verdict=T_CRASHED), asked_restore=ASKED))) == [RestartTrainer]
    loading = decide(observed(trainer=trainer(is_loaded=False, is_paused=True), asked_restore=ASKED))
    assert [action.global_step for action in loading.actions] == [39]


def test_a_person_who_has_to_choose_a_checkpoint_is_told_of_the_tool_that_shows_them():
    none = tuple(CheckpointFacts(global_step=step, status=CheckpointStatus.CANDIDATE) for step in (38, 39))
    seen = observed(trainer=PAUSED, incident=dataclasses.replace(COLLAPSE, had_learned=True))
    (halt,) = decide(dataclasses.replace(seen, checkpoints=none)).actions
    assert "setup_recovery" in halt.reason
