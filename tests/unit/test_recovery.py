"""Transcripts: observe this, and these are the actions; twice the same, and never again while they are under way."""

import dataclasses

import pytest

from launcher.config import RunConfig
from launcher.messages import (
    AbandonServer,
    AdmitServer,
    Cause,
    CondemnCheckpoints,
    Halt,
    Health,
    Incident,
    LoadWeights,
    PauseTrainer,
    RestartServer,
    RestartTrainer,
    RestoreTrainer,
    ResumeTrainer,
    RunWord,
    ServerState,
    Verdict,
)
from launcher.policy import recovery
from launcher.policy.exit_cause import RanOut
from launcher.policy.memory import MemorySettings
from launcher.policy.observed import Observed, ServerFacts, TrainerFacts
from launcher.policy.recovery import plan
from launcher.policy.restart import Attempt, Rung
from launcher.policy.restore import CheckpointFacts, CheckpointHealth
from launcher.policy.run_state import RunState

CONFIG = RunConfig()
NOW = 1000.0
VERSION = 41

ALIVE = Verdict(health=Health.HEALTHY, reason="made a token 0.1 s ago")
UNKNOWN = Verdict(health=Health.UNKNOWN, reason="never looked at")
SUSPECT = Verdict(health=Health.SUSPECT, reason="http stopped for 3.0 s")
CRASHED = Verdict(health=Health.DEAD, reason="exited with -9", cause=Cause.SERVER_CRASH)
OUT_OF_MEMORY = Verdict(health=Health.DEAD, reason="out of device memory", cause=Cause.SERVER_OOM)
T_CRASHED = Verdict(health=Health.DEAD, reason="exited with 1", cause=Cause.TRAINER_CRASH)
T_OUT_OF_MEMORY = Verdict(health=Health.DEAD, reason="out of device memory", cause=Cause.TRAINER_OOM)
CORRUPT = Verdict(health=Health.SUSPECT, reason="log-probs differ", cause=Cause.SERVER_CORRUPT)


def server(number=0, state=ServerState.READY, verdict=ALIVE, **kwargs):
    held = {"weight_version": VERSION, "lineage": 0} | kwargs
    return ServerFacts(name=f"s{number}", state=state, verdict=verdict, **held)


def fresh(number=0, state=ServerState.STALE):
    return server(number, state=state, weight_version=None, lineage=None)


def dead(number=0, verdict=CRASHED, **kwargs):
    return server(number, ServerState.DEAD, verdict, weight_version=None, lineage=None, **kwargs)


TRAINER = TrainerFacts(
    verdict=ALIVE, is_loaded=True, is_paused=False, policy_version=VERSION, lineage=0, next_step=VERSION
)


def trainer(**changes):
    return dataclasses.replace(TRAINER, **changes)


PAUSED = trainer(is_paused=True)
SHELF = tuple(
    CheckpointFacts(global_step=step, policy_version=step + 1, health=health)
    for step, health in ((9, CheckpointHealth.GOOD), (19, CheckpointHealth.GOOD), (39, CheckpointHealth.CANDIDATE))
)
MEMORY = MemorySettings.of(CONFIG, longest_sequence=600, on_gpu=True, shares_gpu=True)
COLLAPSE = Incident(
    cause=Cause.REWARD_COLLAPSE, subject="policy", reason="mean reward fell", since=990.0, onset_step=35
)
BROKEN = Incident(
    cause=Cause.VERIFIER_BROKEN, subject="reward", reason="42 was scored 0", since=990.0, onset_step=VERSION
)


def observed(*servers, state=RunState.RUNNING, trainer=TRAINER, **kwargs):
    return Observed(
        state=state, servers=servers or (server(),), trainer=trainer, checkpoints=SHELF, memory=MEMORY, **kwargs
    )


def attempts(*rungs, cause=Cause.SERVER_CRASH, subject="s0"):
    return [Attempt(at=800.0 + 10 * n, cause=cause, subject=subject, rung=rung) for n, rung in enumerate(rungs)]


def kinds(made):
    return [type(action) for action in made.actions]


def decide(seen, history=(), now=NOW):
    made = plan(seen, history, CONFIG, now)
    assert plan(seen, history, CONFIG, now) == made
    return made


# ── nothing to do ──


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


# ── servers ──


def test_the_life_of_a_repair():
    """C1: dead → restarted → stale → weights → admitted; the trainer goes on with the other server."""
    seen = observed(dead(0), server(1))
    made = decide(seen)
    assert kinds(made) == [RestartServer]
    assert made.actions[0].name == "s0"
    assert made.state is RunState.REPAIRING
    assert made.attempts == (Attempt(at=NOW, cause=Cause.SERVER_CRASH, subject="s0", rung=Rung.SERVER),)

    waiting = decide(observed(dead(0), server(1), under_way=made.actions, state=made.state), made.attempts)
    assert (waiting.actions, waiting.state) == ((), RunState.REPAIRING)

    starting = decide(observed(fresh(0, ServerState.STARTING), server(1), state=made.state), made.attempts)
    assert (starting.actions, starting.state) == ((), RunState.REPAIRING)

    stale = decide(observed(fresh(0), server(1), state=made.state), made.attempts)
    assert stale.actions == (LoadWeights(name="s0", version=VERSION, lineage=0),)

    loaded = decide(observed(server(0, ServerState.STALE), server(1), state=made.state), made.attempts)
    assert loaded.actions == (AdmitServer(name="s0"),)

    ready = decide(observed(server(0), server(1), state=made.state), made.attempts)
    assert (ready.actions, ready.state) == ((), RunState.RUNNING)


@pytest.mark.parametrize(
    "lost",
    [
        server(0, verdict=CRASHED),  # seen before its own actor has said so
        server(0, ServerState.DEAD, UNKNOWN, weight_version=None, lineage=None),  # and the other way round
    ],
)
def test_either_word_for_its_death_is_enough(lost):
    assert kinds(decide(observed(lost, server(1)))) == [RestartServer]


def test_all_servers_lost_at_once_is_the_same_path():
    """C7: the trainer is neither restarted nor paused; its rollouts wait."""
    made = decide(observed(dead(0), dead(1)))
    assert [action.name for action in made.actions] == ["s0", "s1"]
    assert set(kinds(made)) == {RestartServer}


def test_a_second_restart_waits_and_says_until_when():
    made = decide(observed(dead(0), server(1)), history=attempts(Rung.SERVER), now=800.4)
    assert (made.actions, made.wake_at) == ((), 801.0)
    assert "in 0.6 s" in made.reason


SPENT = [Rung.SERVER] * CONFIG.restart.server
BOTH_SPENT = attempts(*SPENT) + attempts(*SPENT, subject="s1")
FLEET_SPENT = BOTH_SPENT + attempts(*[Rung.FLEET] * CONFIG.restart.fleet)


@pytest.mark.parametrize(
    ("servers", "history", "expected"),
    [
        ((dead(0), dead(1)), BOTH_SPENT, [RestartServer, RestartServer]),  # the fleet
        ((dead(0), dead(1)), attempts(*SPENT), [RestartServer]),  # the other one has restarts left
        ((dead(0), server(1)), attempts(*SPENT), [AbandonServer]),  # the run goes on with the other
        ((dead(0), fresh(1, ServerState.STARTING)), attempts(*SPENT), []),  # it may yet be the other
        ((server(0, ServerState.FAILED, CRASHED), server(1)), attempts(*SPENT), []),
        ((server(0, ServerState.FAILED, CRASHED), dead(1)), BOTH_SPENT, [RestartServer, RestartServer]),
        ((dead(0),), attempts(*SPENT), [PauseTrainer]),  # a fleet of one: towards a restore
    ],
)
def test_when_restarts_of_one_server_are_spent(servers, history, expected):
    assert kinds(decide(observed(*servers), history)) == expected


def test_servers_that_die_with_every_process_get_other_weights():
    history = FLEET_SPENT
    pausing = decide(observed(dead(0), dead(1)), history)
    assert kinds(pausing) == [PauseTrainer]
    assert pausing.state is RunState.PAUSED
    going_back = decide(observed(dead(0), dead(1), trainer=PAUSED, state=RunState.PAUSED), history)
    assert kinds(going_back) == [RestoreTrainer, RestartServer, RestartServer]
    assert going_back.actions[0].global_step == 19
    assert going_back.attempts[-1].rung is Rung.RESTORE


def test_and_when_nothing_helps_the_run_halts():
    made = decide(observed(dead(0)), attempts(*SPENT, *[Rung.RESTORE] * CONFIG.restart.restore))
    assert kinds(made) == [Halt]
    assert made.actions[0].word is RunWord.ERRORED
    assert "server 3 times, restore 3 times" in made.actions[0].reason
    assert made.state is RunState.SHUTTING_DOWN


def test_progress_of_the_server_itself_refills_its_budget():
    history = attempts(*SPENT)
    assert kinds(decide(observed(dead(0, progress_at=900.0), server(1)), history)) == [RestartServer]
    assert kinds(decide(observed(dead(0), server(1), progress_at=900.0), history)) == [AbandonServer]


def test_a_server_out_of_memory_starts_one_rung_down_however_often_it_was_tried():
    seen = observed(dead(0, OUT_OF_MEMORY, ran_out=RanOut.SERVER_DEVICE), server(1))
    made = decide(seen, attempts(*SPENT, cause=Cause.SERVER_OOM))
    assert made.actions[0].overrides == {"sglang.mem_fraction_static": 0.7}


@pytest.mark.parametrize(
    ("held", "why"),
    [
        ({"weight_version": 40}, "an older version"),
        ({"weight_version": None, "lineage": None}, "none"),
        ({"lineage": 3}, "the same number from before a restore"),
    ],
)
def test_a_ready_server_with_other_weights_gets_the_current_ones(held, why):
    made = decide(observed(server(0, **held), server(1)))
    assert made.actions == (LoadWeights(name="s0", version=VERSION, lineage=0),), why


def test_damaged_weights_are_loaded_again_then_the_server_is_restarted():
    seen = observed(server(0, verdict=CORRUPT), server(1))
    assert kinds(decide(seen)) == [LoadWeights]
    retries = attempts(*[Rung.RETRY] * CONFIG.restart.retry, cause=Cause.SERVER_CORRUPT)
    assert kinds(decide(seen, retries)) == [RestartServer]
    loading = dataclasses.replace(seen, under_way=(LoadWeights(name="s0", version=VERSION, lineage=0),))
    assert decide(loading, retries).actions == ()


def test_weights_that_are_not_to_be_had_are_waited_for():
    for waiting in (trainer(verdict=T_CRASHED), trainer(is_loaded=False, verdict=UNKNOWN), trainer(is_publishing=True)):
        assert LoadWeights not in kinds(decide(observed(fresh(0), server(1), trainer=waiting)))


# ── trainer ──


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


def test_a_trainer_is_not_resumed_before_a_server_has_its_weights():
    back = trainer(is_paused=True, policy_version=40, next_step=40, lineage=1)
    for unready in (
        dead(0),
        fresh(0),
        server(0, ServerState.STALE, weight_version=40, lineage=1),
        server(0, lineage=0),
    ):
        assert ResumeTrainer not in kinds(decide(observed(unready, trainer=back, state=RunState.RESTORING)))


def test_a_trainer_out_of_memory_starts_one_rung_down():
    lost = trainer(verdict=T_OUT_OF_MEMORY, ran_out=RanOut.TRAINER_DEVICE)
    made = decide(observed(trainer=lost))
    assert made.actions[0].overrides == {"actor.mb_spec.max_tokens_per_mb": CONFIG.actor.mb_spec.max_tokens_per_mb // 2}


def test_a_trainer_that_dies_again_and_again_halts():
    history = attempts(*[Rung.RESTORE] * CONFIG.restart.restore, cause=Cause.TRAINER_CRASH, subject="trainer")
    assert kinds(decide(observed(trainer=trainer(verdict=T_CRASHED)), history)) == [Halt]
    assert kinds(decide(observed(trainer=trainer(verdict=T_CRASHED), progress_at=900.0), history)) == [RestartTrainer]


def test_a_checkpoint_that_cannot_be_loaded_is_not_tried_for_ever():
    empty = trainer(is_loaded=False, is_paused=True)
    retries = attempts(*[Rung.RETRY] * CONFIG.restart.retry, cause=Cause.CHECKPOINT_CORRUPT, subject="trainer")
    assert kinds(decide(observed(trainer=empty), retries)) == [RestartTrainer]


def test_a_server_that_dies_while_the_trainer_recovers_is_mended_beside_it():
    """D1"""
    made = decide(observed(dead(0), server(1), trainer=trainer(verdict=T_CRASHED)))
    assert set(kinds(made)) == {RestartTrainer, RestartServer}
    assert made.state is RunState.RESTORING


# ── rewards ──


def test_the_life_of_a_collapse():
    """S4: paused → what came after the onset condemned, restored to before it → weights → resumed."""
    pausing = decide(observed(incident=COLLAPSE))
    assert pausing.actions == (PauseTrainer(reason=COLLAPSE.reason),)
    assert pausing.state is RunState.PAUSED

    restoring = decide(observed(incident=COLLAPSE, trainer=PAUSED, state=pausing.state))
    assert kinds(restoring) == [CondemnCheckpoints, RestoreTrainer]
    assert restoring.actions[0].after_step == 33  # step 35 began with the weights after step 34
    assert restoring.actions[1].global_step == 19
    assert restoring.state is RunState.RESTORING
    assert restoring.attempts[0].onset_step == 35

    back = trainer(is_paused=True, policy_version=20, next_step=20, lineage=1)
    stale = decide(observed(incident=COLLAPSE, trainer=back, state=restoring.state), restoring.attempts)
    assert stale.actions == (LoadWeights(name="s0", version=20, lineage=1),)


def test_a_third_collapse_at_the_same_place_halts():
    history = [
        Attempt(
            at=NOW - 100,
            cause=Cause.REWARD_COLLAPSE,
            subject="trainer",
            rung=Rung.RESTORE,
            onset_step=o,
            restored_step=r,
        )
        for o, r in ((33, 19), (36, 9))
    ]
    made = decide(observed(incident=COLLAPSE, trainer=PAUSED, state=RunState.PAUSED, progress_at=NOW - 1), history)
    assert kinds(made) == [Halt]
    assert "3 times: restoring does not help" in made.actions[0].reason


def test_a_broken_verifier_pauses_and_in_the_end_halts_but_restores_nothing():
    """S1: the gate stopped its first false batch, so no weights are damaged."""
    pausing = decide(observed(incident=BROKEN))
    assert kinds(pausing) == [PauseTrainer]
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
        assert LoadWeights not in kinds(made) or incident is BROKEN


def test_without_the_look_at_the_damage_it_would_be_resumed(monkeypatch):
    monkeypatch.setattr("launcher.policy.mend_trainer.damage_stands", lambda incident, trainer: False)
    monkeypatch.setattr(recovery, "damage_stands", lambda incident, trainer: False)
    made = decide(observed(incident=COLLAPSE, trainer=PAUSED, state=RunState.PAUSED))
    assert kinds(made) == [ResumeTrainer]


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


def test_a_hold_pauses_and_keeps_paused():
    assert decide(observed(hold_reason="look first")).actions == (PauseTrainer(reason="look first"),)
    assert decide(observed(hold_reason="look first", trainer=PAUSED, state=RunState.PAUSED)).actions == ()


@pytest.mark.parametrize(
    ("seen", "word"),
    [
        (observed(trainer=trainer(is_finished=True)), RunWord.FINISHED),
        (observed(dead(0), trainer=trainer(is_finished=True)), RunWord.FINISHED),
        (observed(abort_reason="Ctrl-C"), RunWord.ABORTED),
        (observed(dead(0), abort_reason="Ctrl-C", state=RunState.INITIALIZING), RunWord.ABORTED),
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
