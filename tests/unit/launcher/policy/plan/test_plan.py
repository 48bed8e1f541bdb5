"""Transcripts of whole runs: observe this, and these are the actions; twice the same, and none that is under way."""

import dataclasses

import pytest

from launcher.base.messages import ServerState, TerminalStatus
from launcher.policy.actions import (
    Halt,
    LoadWeights,
    PauseTrainer,
    RestartServer,
    RestoreTrainer,
    ResumeTrainer,
)
from launcher.policy.observed import RunState
from launcher.policy.restart_budget import Rung
from tests.support.simulated_run.looks import (
    BROKEN,
    COLLAPSE,
    CONFIG,
    CRASHED,
    PAUSED,
    SUSPECT,
    UNKNOWN,
    VERSION,
    attempts,
    dead,
    decide,
    fresh,
    kinds,
    observed,
    server,
    trainer,
)


@pytest.mark.parametrize(
    "seen",
    [
        observed(),
        observed(server(0), server(1)),
        observed(server(verdict=UNKNOWN)),  # P7: unknown is no reason to kill
        observed(server(state=ServerState.SUSPECT, verdict=SUSPECT)),
        observed(server(), trainer=trainer(verdict=UNKNOWN)),
        observed(server(), trainer=trainer(verdict=SUSPECT)),
        observed(server(weight_version=40), trainer=trainer(is_publishing=True)),
        observed(server(), incident=dataclasses.replace(COLLAPSE, onset_step=VERSION + 9)),  # restored to before it
        observed(server(), server(1, state=ServerState.STOPPED)),
        observed(server(), dead(1, verdict=CRASHED), under_way=(RestartServer(name="s1", reason=""),)),
    ],
)
def test_what_is_well_or_not_known_is_left_alone(seen):
    assert decide(seen).actions == ()


def test_after_its_own_death_the_coordinator_adopts_what_lives():
    """M1: nothing but the journal's word for the state is needed; no child is restarted."""
    made = decide(observed(server(0), server(1)), history=attempts(Rung.SERVER, Rung.SERVER))
    assert (made.actions, made.state) == ((), RunState.RUNNING)


# ── rewards ──


def test_the_life_of_a_collapse():
    """S4: paused → what came after the onset condemned, restored to before it → weights → resumed."""
    pausing = decide(observed(incident=COLLAPSE))
    assert pausing.actions == (PauseTrainer(reason=COLLAPSE.reason, save=True),), "what follows can be undone"
    assert pausing.state is RunState.PAUSED

    restoring = decide(observed(incident=COLLAPSE, trainer=PAUSED, state=pausing.state))
    (restore,) = restoring.actions
    assert restore.condemn_after == 33  # step 35 began with the weights after step 34
    assert (type(restore), restore.global_step) == (RestoreTrainer, 19)
    assert restoring.state is RunState.RESTORING
    assert restoring.attempts[0].onset_step == 35

    back = trainer(is_paused=True, policy_version=20, next_step=20, lineage=1)
    stale = decide(observed(incident=COLLAPSE, trainer=back, state=restoring.state), restoring.attempts)
    assert stale.actions == (LoadWeights(name="s0", version=20, lineage=1),)


def test_no_step_is_taken_before_what_holds_the_damage_is_condemned():
    """A disk that answered late to the order took the checkpoint of the steps after the restore for one of before it,
    and dropped their state in memory."""
    back = trainer(is_paused=True, policy_version=20, next_step=20, lineage=1)
    restored = observed(server(weight_version=20, lineage=1), incident=COLLAPSE, trainer=back)
    late = RestoreTrainer(global_step=19, condemn_after=33, reason="its disk stalls")
    assert kinds(decide(restored)) == [ResumeTrainer]
    assert kinds(decide(dataclasses.replace(restored, under_way=(late,)))) == []


def test_a_broken_verifier_pauses_and_in_the_end_halts_but_restores_nothing():
    """S1: the gate stopped its first false batch, so no weights are damaged."""
    pausing = decide(observed(incident=BROKEN))
    assert pausing.actions == (PauseTrainer(reason=BROKEN.reason, save=True),), "else a reboot would cost steps"
    waiting = decide(observed(incident=BROKEN, trainer=PAUSED, state=RunState.PAUSED))
    assert (waiting.actions, waiting.state) == ((), RunState.PAUSED)
    assert waiting.wake_at == BROKEN.since + CONFIG.reward_health.verifier_patience_s
    assert kinds(decide(observed(incident=BROKEN, trainer=PAUSED, state=RunState.PAUSED), now=waiting.wake_at)) == [
        Halt
    ]
    mended = decide(observed(trainer=PAUSED, state=RunState.PAUSED))
    assert mended.actions == (ResumeTrainer(),)


def test_a_broken_verifier_found_late_costs_only_the_steps_trained_on_it():
    """S2: the onset is known by the step, so nothing before it is thrown away."""
    late = dataclasses.replace(BROKEN, onset_step=40)
    made = decide(observed(incident=late, trainer=PAUSED, state=RunState.PAUSED))
    assert kinds(made) == [RestoreTrainer]
    assert made.actions[0].global_step == 39


def test_the_trainer_is_never_resumed_on_damage_or_a_broken_verifier():
    for incident in (COLLAPSE, BROKEN):
        made = decide(observed(incident=incident, trainer=PAUSED, state=RunState.PAUSED))
        assert ResumeTrainer not in kinds(made)
    behind = server(weight_version=40)
    damaged = decide(observed(behind, incident=COLLAPSE, trainer=PAUSED, state=RunState.PAUSED))
    assert LoadWeights not in kinds(damaged), "no server gets damaged weights"
    sound = decide(observed(behind, incident=BROKEN, trainer=PAUSED, state=RunState.PAUSED))
    assert kinds(sound) == [LoadWeights], "a broken reward function has damaged none"


# ── beginning and end ──


def test_the_first_step_of_a_run():
    new = trainer(is_loaded=False, is_paused=True, policy_version=0, next_step=0)
    beginning = decide(observed(fresh(0, ServerState.STARTING), trainer=new, state=RunState.INITIALIZING))
    assert kinds(beginning) == [RestoreTrainer]
    assert beginning.state is RunState.INITIALIZING
    loaded = trainer(is_paused=True, policy_version=0, next_step=0)
    empty = server(weight_version=0)
    resuming = decide(observed(empty, trainer=loaded, state=RunState.INITIALIZING))
    assert (resuming.actions, resuming.state) == ((ResumeTrainer(),), RunState.INITIALIZING)
    going = dataclasses.replace(loaded, is_paused=False)
    assert decide(observed(empty, trainer=going, state=RunState.INITIALIZING)).state is RunState.RUNNING


@pytest.mark.parametrize(("who", "named"), [("monitor", "HealthMonitor"), ("door", "door of the trainer's servers")])
def test_a_monitor_that_never_answers_ends_the_run_and_one_that_is_away_does_not(who, named):
    """Every step needs its word, and Ray starts it again for ever. A door that hung each time was ended for ever, and
    its command waited."""
    patience = CONFIG.health.monitor_silence_s
    assert decide(observed(**{f"{who}_silent_s": patience})).actions == ()
    silent = {f"{who}_silent_s": patience + 1, f"{who}_error": "the door failed: OSError(98)\nat"}
    (halt,) = decide(observed(**silent)).actions
    assert (type(halt), halt.word) == (Halt, TerminalStatus.ERRORED)
    said = f"the Coordinator's questions to the {named} have had no usable answer for {patience + 1:.0f} s, more than "
    assert halt.reason.startswith(f"{said}health.monitor_silence_s; the last: the door failed: OSError(98) at; ")


def test_a_hold_before_the_first_step_is_paused_as_soon_as_there_could_be_one():
    """`run_control pause` of a run that starts: it said INITIALIZING for ever, and that the pause was not done."""
    held = {"hold_reason": "look first", "state": RunState.INITIALIZING}
    loaded, empty = trainer(is_paused=True, policy_version=0, next_step=0), server(weight_version=0)
    ready = decide(observed(empty, trainer=loaded, **held))
    assert (ready.actions, ready.state) == ((), RunState.PAUSED)
    assert "look first" in ready.reason
    assert decide(observed(fresh(0, ServerState.STARTING), trainer=loaded, **held)).state is RunState.INITIALIZING
    not_loaded = dataclasses.replace(loaded, is_loaded=False)
    assert decide(observed(empty, trainer=not_loaded, **held)).state is RunState.INITIALIZING
    released = decide(observed(empty, trainer=loaded, state=RunState.PAUSED))
    assert released.actions == (ResumeTrainer(),)


@pytest.mark.parametrize("word", TerminalStatus)
def test_an_end_that_was_decided_is_final_whatever_the_state_says(word):
    """Its status is in the journal before the state is: a Coordinator that is killed between them must not repair."""
    made = decide(observed(dead(0), server(1), ending=word))
    assert made.actions == (Halt(reason="the run was being shut down", word=word),)
    assert made.state is RunState.SHUTTING_DOWN


@pytest.mark.parametrize(
    ("seen", "word"),
    [
        (observed(trainer=trainer(is_finished=True)), TerminalStatus.FINISHED),
        (observed(dead(0), trainer=trainer(is_finished=True)), TerminalStatus.FINISHED),
        (observed(abort_reason="Ctrl-C"), TerminalStatus.ABORTED),
        (observed(dead(0), abort_reason="Ctrl-C", state=RunState.INITIALIZING), TerminalStatus.ABORTED),
    ],
)
def test_every_end_has_its_word(seen, word):
    made = decide(seen)
    assert kinds(made) == [Halt]
    assert (made.actions[0].word, made.state) == (word, RunState.SHUTTING_DOWN)
    ending = dataclasses.replace(seen, state=made.state, ending=word, under_way=made.actions)
    assert decide(ending).actions == ()
    orphaned = dataclasses.replace(ending, under_way=())  # whoever began to shut down was killed
    assert decide(orphaned).actions[0].word is word
    stopped = decide(dataclasses.replace(ending, is_stopped=True, under_way=()))
    assert stopped.state is RunState(word)
    assert decide(dataclasses.replace(ending, state=stopped.state)).actions == ()
