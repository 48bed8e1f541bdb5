"""Which incidents begin and end with a look: tables over the pure policy, and the history that numbers them."""

import dataclasses

import pytest

from launcher.base.messages import Cause, Health, Incident, Rejection, ServerState, TerminalStatus, Verdict
from launcher.policy.actions import AdmitServer, Halt, LoadWeights, PauseTrainer, RestartServer
from launcher.policy.incident_policy import OpenIncident, Trouble, incident_changes, repair_text
from launcher.policy.observed import Observed, RunState, ServerFacts, TrainerFacts
from launcher.policy.restart_budget import RepairAttempt, Rung
from launcher.policy.reward_health import LowerLevel
from launcher.run_files.run_memory import IncidentMemory
from tests.support.simulated_run.run_model import ALIVE, MEMORY, killed

STEPS = TrainerFacts(verdict=ALIVE, is_loaded=True, is_paused=False, policy_version=7, lineage=1, next_step=7)
SERVES = ServerFacts(name="server-0", state=ServerState.READY, verdict=ALIVE, weight_version=7, lineage=1)
DIED = dataclasses.replace(SERVES, state=ServerState.DEAD, verdict=killed(Cause.SERVER_CRASH))
STARTS = dataclasses.replace(SERVES, state=ServerState.STARTING, verdict=Verdict(health=Health.UNKNOWN, reason=""))
STALE = dataclasses.replace(SERVES, state=ServerState.STALE, weight_version=6)
OLD = dataclasses.replace(SERVES, weight_version=6)
DOUBTED = dataclasses.replace(
    SERVES, verdict=Verdict(health=Health.SUSPECT, reason="0.3 away", cause=Cause.SERVER_CORRUPT)
)
SLOW = dataclasses.replace(SERVES, verdict=Verdict(health=Health.SUSPECT, reason="slow", cause=Cause.SERVER_SLOW))
GIVEN_UP = dataclasses.replace(DIED, state=ServerState.FAILED)
NO_TRAINER = dataclasses.replace(STEPS, verdict=killed(Cause.TRAINER_CRASH), is_loaded=False)
EMPTY = dataclasses.replace(STEPS, is_loaded=False, is_paused=True)
PAUSED = dataclasses.replace(STEPS, is_paused=True)
FALL = Incident(cause=Cause.REWARD_COLLAPSE, subject="policy", reason="fell", since=5.0, onset_step=4)
BROKEN = Incident(cause=Cause.VERIFIER_BROKEN, subject="reward", reason="0, not 1", since=5.0, onset_step=7)
SERVER = OpenIncident(number=1, cause=Cause.SERVER_CRASH, subject="server-0", since=1.0)
TRAINER = OpenIncident(number=2, cause=Cause.TRAINER_CRASH, subject="trainer", since=1.0)
REWARD = OpenIncident(number=3, cause=Cause.VERIFIER_BROKEN, subject="reward", since=1.0)
UNSCORED = OpenIncident(number=5, cause=Cause.VERIFIER_BROKEN, subject="reward", since=1.0, onset_step=STEPS.next_step)
POLICY = OpenIncident(number=4, cause=Cause.REWARD_COLLAPSE, subject="policy", since=1.0)
FELL = dataclasses.replace(POLICY, onset_step=7)


def look(*servers, trainer=STEPS, state=RunState.RUNNING, **more):
    given = {"servers": servers or (SERVES,), "checkpoints": (), "memory": MEMORY}
    return Observed(state=state, trainer=trainer, **(given | more))


def begun(change):
    return [(trouble.cause, trouble.subject) for trouble in change.begins]


def ended(change):
    return [(ending.incident.number, ending.is_mended) for ending in change.ends]


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (look(), []),
        (look(DIED), [(Cause.SERVER_CRASH, "server-0")]),
        (look(DOUBTED), [(Cause.SERVER_CORRUPT, "server-0")]),
        (look(SLOW), []),
        (look(STARTS), []),
        (look(GIVEN_UP), []),
        (look(trainer=NO_TRAINER), [(Cause.TRAINER_CRASH, "trainer")]),
        (look(trainer=PAUSED), []),
        (look(incident=FALL), [(Cause.REWARD_COLLAPSE, "policy")]),
        (look(incident=BROKEN), [(Cause.VERIFIER_BROKEN, "reward")]),
        (look(DIED, trainer=NO_TRAINER), [(Cause.SERVER_CRASH, "server-0"), (Cause.TRAINER_CRASH, "trainer")]),
        (look(DIED, state=RunState.SHUTTING_DOWN), []),
        (look(DIED, abort_reason="asked"), []),
    ],
)
def test_what_begins_where_nothing_is_open(seen, expected):
    assert begun(incident_changes([], seen)) == expected


@pytest.mark.parametrize(
    ("one", "seen", "expected"),
    [
        (SERVER, look(DIED), []),
        (SERVER, look(STARTS), []),
        (SERVER, look(STALE), []),
        (SERVER, look(STALE, trainer=dataclasses.replace(STEPS, is_publishing=True)), []),
        (SERVER, look(DOUBTED), []),
        (SERVER, look(SERVES), [(1, True)]),
        (SERVER, look(GIVEN_UP), [(1, False)]),
        (SERVER, look(DIED, state=RunState.FINISHED), [(1, False)]),
        (TRAINER, look(trainer=NO_TRAINER), []),
        (TRAINER, look(trainer=EMPTY), []),
        (TRAINER, look(trainer=PAUSED), []),
        (TRAINER, look(), [(2, True)]),
        (TRAINER, look(trainer=dataclasses.replace(PAUSED, is_finished=True)), [(2, True)]),
        (REWARD, look(incident=BROKEN), []),
        (REWARD, look(trainer=PAUSED), []),
        (REWARD, look(), [(3, True)]),
        (UNSCORED, look(), []),  # its known answers are right, and its step is tried again
        (UNSCORED, look(trainer=dataclasses.replace(STEPS, is_finished=True)), [(5, True)]),
        (UNSCORED, look(trainer=dataclasses.replace(STEPS, next_step=STEPS.next_step + 1)), [(5, True)]),
        (UNSCORED, look(trainer=dataclasses.replace(STEPS, next_step=STEPS.next_step - 1)), [(5, True)]),  # restored
        (POLICY, look(incident=FALL), []),
        (POLICY, look(trainer=PAUSED), []),
        (POLICY, look(), [(4, True)]),
        (POLICY, look(is_judged=False), []),  # whoever finds that it is over is away
        (TRAINER, look(is_judged=False), [(2, True)]),
        (POLICY, look(lower_level=LowerLevel(since_step=7, is_settled=False)), []),
        (FELL, look(lower_level=LowerLevel(since_step=7, is_settled=False)), []),
        (FELL, look(lower_level=LowerLevel(since_step=7, is_settled=True)), [(4, True)]),
        (FELL, look(lower_level=LowerLevel(since_step=6, is_settled=False)), [(4, True)]),  # of an earlier fall
        (TRAINER, look(lower_level=LowerLevel(since_step=7, is_settled=False)), [(2, True)]),
    ],
)
def test_when_one_ends(one, seen, expected):
    change = incident_changes([one], seen)
    assert ended(change) == expected
    assert not change.begins, "another trouble of the same subject is the same incident"


def test_a_lower_level_that_stays_is_said_to_stay():
    (ending,) = incident_changes([FELL], look(lower_level=LowerLevel(since_step=7, is_settled=True))).ends
    assert ending.reason == "rewards are lower since step 7, and no collapse was found: training continues"


def rejection(cause, *subjects):
    return Rejection(id="r", global_step=7, reason="no", cause=cause, subjects=subjects)


@pytest.mark.parametrize(
    ("turned_away", "subject"),
    [
        (rejection(Cause.VERIFIER_BROKEN), "reward"),
        (rejection(Cause.NONFINITE), "trainer"),
        (rejection(Cause.REWARD_COLLAPSE), "policy"),
        (rejection(Cause.SERVER_CORRUPT, "server-0"), "server-0"),
        (rejection(Cause.SERVER_CRASH), "batch"),
        (rejection(None), "batch"),
    ],
)
def test_a_rejected_batch_is_an_incident_until_a_step_is_committed(turned_away, subject):
    (begun,) = incident_changes([], look(rejections=(turned_away,))).begins
    assert begun.subject == subject
    assert (repair_text(begun, []) == "its prompts are taken again") is (subject == "batch")
    one = OpenIncident(number=1, cause=begun.cause, subject=subject, since=0.0)
    assert incident_changes([one], look(rejections=(turned_away,))).ends == ()
    assert ended(incident_changes([one], look())) == [(1, True)]


def test_a_server_that_lost_its_weights_is_stale_but_not_after_a_restore_or_at_the_start():
    tried = [RepairAttempt(at=1.0, cause=Cause.SERVER_STALE, subject="server-0", rung=Rung.RETRY)]
    assert begun(incident_changes([], look(STALE), attempts=tried)) == [(Cause.SERVER_STALE, "server-0")]
    why = dataclasses.replace(STALE, stale_reason="POST /update_weights_from_disk: the connection broke off")
    (told,) = incident_changes([], look(why), attempts=tried).begins
    assert told.reason == (
        "it does not hold the trainer's weights: POST /update_weights_from_disk: the connection broke off"
    )
    assert not incident_changes([TRAINER], look(STALE, trainer=PAUSED), attempts=tried).begins
    assert not incident_changes([], look(STALE, state=RunState.INITIALIZING), attempts=tried).begins


def test_a_damaged_checkpoint_is_one_and_ends_when_another_one_is_loaded():
    (trouble,) = incident_changes([], look(trainer=EMPTY), damaged={4}).begins
    assert (trouble.cause, trouble.subject) == (Cause.CHECKPOINT_CORRUPT, "checkpoint 4")
    one = OpenIncident(number=1, cause=trouble.cause, subject=trouble.subject, since=0.0)
    assert incident_changes([one], look(trainer=EMPTY)).ends == ()
    assert ended(incident_changes([one], look())) == [(1, True)]


@pytest.mark.parametrize(
    ("actions", "doing"),
    [
        ([RestartServer(name="server-0", reason="")], "it is being restarted"),
        ([RestartServer(name="server-1", reason="")], "it is being repaired"),
        ([LoadWeights(name="server-0", version=1, lineage=1)], "its weights are sent again"),
        ([PauseTrainer(reason="")], "it is being repaired"),
    ],
)
def test_what_is_done_is_said(actions, doing):
    assert repair_text(Trouble(cause=Cause.SERVER_CRASH, subject="server-0", reason=""), actions) == doing


# ── numbers ──


def test_numbers_go_on_and_a_death_that_is_heard_of_first_has_the_number_of_its_incident():
    record = IncidentMemory()
    assert record.number_of_death("server-0") == 1
    record.reserve("server-0", 1)
    assert record.number_for("server.restarting", "server-0") == 1
    assert record.number_of_death("server-1") == 2
    record.reserve("server-1", 2)
    assert (record.number_to_begin("server-0"), record.number_to_begin("server-1")) == (1, 2)
    record.begin(1, Cause.SERVER_CRASH, "server-0", 1.0)
    assert record.number_of_death("server-0") == 1
    record.end(1)
    assert record.number_for("server.ready", "server-0") is None
    assert record.number_of_death("server-0") == 3


def test_a_repair_of_the_trainer_concerns_the_servers_too():
    record = IncidentMemory()
    record.begin(1, Cause.TRAINER_CRASH, "trainer", 1.0)
    assert record.number_for("server.loading", "server-1") == 1
    assert record.number_for("run.restoring", "") == 1
    assert record.number_for("run.running", "") is None


def test_what_an_earlier_attempt_left_open_is_known_as_such():
    record = IncidentMemory()
    record.begin(1, Cause.SERVER_CRASH, "server-0", 1.0)
    record = record.next_attempt()
    assert not record.open
    assert list(record.left_open) == [1]
    assert record.number_to_begin("server-0") == 2
    record.end(1)
    assert not record.left_open


@pytest.mark.parametrize(
    ("change", "begins"),
    [
        ({"ending": TerminalStatus.ERRORED}, 0),
        ({"abort_reason": "Ctrl-C"}, 0),
        ({"state": RunState.SHUTTING_DOWN}, 0),
        ({}, 1),
    ],
)
def test_while_a_run_ends_no_incident_begins_and_those_that_are_over_end(change, begins):
    other = dataclasses.replace(SERVES, name="server-1")
    over = OpenIncident(number=1, cause=Cause.SERVER_CRASH, subject="server-1", since=1.0)
    found = incident_changes([over], look(DIED, other, **change))
    assert len(found.begins) == begins
    assert ended(found) == [(1, True)]


@pytest.mark.parametrize("change", [{"state": RunState.FINISHED}, {"is_stopped": True}])
def test_a_run_that_is_over_ends_all_unmended(change):
    found = incident_changes([SERVER, REWARD], look(DIED, **change))
    assert (begun(found), ended(found)) == ([], [(1, False), (3, False)])


def test_a_cause_that_was_named_is_kept_and_one_that_was_not_is_a_crash():
    unnamed = Verdict(health=Health.DEAD, reason="gone")
    hung = Verdict(health=Health.DEAD, reason="no progress", cause=Cause.TRAINER_HANG)
    of_server = look(dataclasses.replace(DIED, verdict=unnamed))
    assert begun(incident_changes([], of_server)) == [(Cause.SERVER_CRASH, "server-0")]
    assert begun(incident_changes([], look(trainer=dataclasses.replace(STEPS, verdict=unnamed)))) == [
        (Cause.TRAINER_CRASH, "trainer")
    ]
    assert begun(incident_changes([], look(trainer=dataclasses.replace(STEPS, verdict=hung)))) == [
        (Cause.TRAINER_HANG, "trainer")
    ]
    unknown = dataclasses.replace(
        SERVES, verdict=Verdict(health=Health.UNKNOWN, reason="not looked at", cause=Cause.SERVER_CORRUPT)
    )
    assert begun(incident_changes([], look(unknown))) == []


def test_only_weights_that_are_loaded_again_by_a_living_server_s_fault_are_an_incident():
    def repair(cause, subject):
        return RepairAttempt(at=1.0, cause=cause, subject=subject, rung=Rung.RETRY)

    tried = [
        repair(Cause.SERVER_STALE, "server-0"),
        repair(Cause.SERVER_STALE, "server-9"),
        repair(Cause.CHECKPOINT_CORRUPT, "server-0"),
    ]
    assert begun(incident_changes([], look(), attempts=tried)) == [(Cause.SERVER_STALE, "server-0")]
    assert begun(incident_changes([], look(), attempts=tried[1:])) == []
    gone = incident_changes([SERVER], look(DIED), attempts=tried[:1])
    assert begun(gone) == []


@pytest.mark.parametrize(
    ("one", "seen", "reason"),
    [
        (SERVER, look(STALE), None),
        (SERVER, look(OLD), None),
        (SERVER, look(OLD, trainer=dataclasses.replace(STEPS, is_publishing=True)), "it serves again"),
        (SERVER, look(), "it serves again"),
        (SERVER, look(under_way=(AdmitServer(name="server-0"),)), None),
        (SERVER, look(under_way=(AdmitServer(name="server-1"),)), "it serves again"),
        (TRAINER, look(), "training continues"),
        (TRAINER, look(trainer=dataclasses.replace(STEPS, is_finished=True, is_paused=True)), "training is done"),
        (TRAINER, look(trainer=PAUSED), None),
        (TRAINER, look(trainer=EMPTY), None),
        (TRAINER, look(trainer=dataclasses.replace(STEPS, is_loaded=False)), None),
        (REWARD, look(trainer=dataclasses.replace(STEPS, verdict=killed(Cause.TRAINER_CRASH))), None),
        (REWARD, look(incident=FALL), None),
        (REWARD, look(incident=dataclasses.replace(FALL, onset_step=20)), "training continues"),
    ],
)
def test_an_incident_ends_with_what_shows_that_it_is_over(one, seen, reason):
    found = incident_changes([one], seen)
    assert [ending.reason for ending in found.ends] == ([] if reason is None else [reason])


def test_a_repair_that_ends_the_run_says_so_whatever_else_is_done():
    trouble = Trouble(cause=Cause.SERVER_CRASH, subject="server-0", reason="")
    assert repair_text(trouble, [PauseTrainer(reason=""), Halt(reason="spent")]) == "the run is being ended"


def test_what_only_the_launchers_own_trainer_does_is_not_said_of_a_command():
    """It has no gate, so that no batch is dropped, and its memory settings are its own."""
    for cause in (Cause.TRAINER_OOM, Cause.NONFINITE, Cause.REWARD_COLLAPSE, Cause.VERIFIER_BROKEN):
        trouble = Trouble(cause=cause, subject="trainer", reason="")
        own, of_a_command = repair_text(trouble, []), repair_text(trouble, [], is_command=True)
        assert own != of_a_command
        assert of_a_command.startswith("it is ")
    crash = Trouble(cause=Cause.TRAINER_CRASH, subject="trainer", reason="")
    assert repair_text(crash, [], is_command=True) == "it is restarted and resumes from its newest whole checkpoint"


def test_a_batch_keeps_the_cause_that_it_was_rejected_for():
    def rejected(cause):
        batch = Rejection(global_step=7, cause=cause, reason="0.3 away", subjects=("server-0",), id="r")
        return begun(incident_changes([], look(rejections=(batch,))))

    assert rejected(Cause.SERVER_STALE) == [(Cause.SERVER_STALE, "server-0")]
    assert rejected(None) == [(Cause.SERVER_CORRUPT, "server-0")]
