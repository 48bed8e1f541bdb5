"""A HealthMonitor that takes the place of another knows from the run's files what that one knew."""

import pytest

from launcher.base.messages import Cause
from launcher.policy.canary_policy import LAST_ATTEMPT_BROKE
from launcher.run_files.journal import Journal
from tests.support.worlds.health_monitor import SOUND, WRONG, batch, use
from tests.support.worlds.health_monitor import world as world


def test_a_successor_knows_from_the_files_what_its_predecessor_knew(world):
    world.steps(60)
    for step in range(60, 66):
        world.step(step, reward=0.0, high=0.0)
    answers = [use(world, lambda monitor: (monitor.admit(batch(66)), monitor.report().incident)) for _ in range(2)]
    assert [answer.cause for answer, _ in answers] == [Cause.REWARD_COLLAPSE] * 2
    assert answers[0][1].onset_step == answers[1][1].onset_step


def test_a_successor_does_not_acquit_a_verifier_that_was_accused(world):
    world.steps(30)
    use(world, lambda monitor: monitor.admit(batch(30, canaries=(WRONG,))))
    answer = use(world, lambda monitor: monitor.admit(batch(30, canaries=(SOUND,))))
    assert answer.cause is Cause.VERIFIER_BROKEN
    assert answer.reason == "right was scored 0, not 1 (seen before the monitor was restarted)"
    assert len(world.events("canary.wrong")) == 1


@pytest.mark.parametrize("trained", [1, 2])
def test_a_successor_says_at_once_what_its_predecessor_knew(world, trained):
    """It named no incident before the next batch: the Coordinator called the incident over, told a person so, and had
    the trainer continue. Of an earlier attempt it says nothing: where this one begins is not chosen yet."""
    world.steps(30)
    world.journal.record("trainer.restored", subject="trainer", global_step=29)
    use(world, lambda monitor: monitor.admit(batch(30, canaries=(WRONG,))))
    world.journal = Journal(world.paths.events, attempt=trained)
    incident = use(world, lambda monitor: monitor.report().incident)
    assert (incident and incident.cause) == (Cause.VERIFIER_BROKEN if trained == 1 else None)


def test_the_successor_of_another_attempt_says_when_the_reward_function_was_broken(world):
    """A run whose reward function had been repaired began with 'the reward function is broken', in the present."""
    world.steps(30)
    world.journal.record("trainer.restored", subject="trainer", global_step=29)
    use(world, lambda monitor: monitor.admit(batch(30, canaries=(WRONG,))))
    world.journal = Journal(world.paths.events, attempt=2)
    world.journal.record("trainer.restored", subject="trainer", global_step=29)
    incident = use(world, lambda monitor: monitor.report().incident)
    assert incident.cause is Cause.VERIFIER_BROKEN
    assert incident.reason == LAST_ATTEMPT_BROKE


@pytest.mark.parametrize("is_undone", [False, True])
def test_a_successor_knows_which_server_had_other_weights(world, is_undone):
    """It called the policy collapsed where its predecessor accused the server."""
    world.steps(60)
    rejected = {"subject": "trainer", "global_step": 60, "cause": Cause.SERVER_STALE, "subjects": ["server-0"]}
    world.journal.record("batch.rejected", **rejected)
    if is_undone:
        world.journal.record("repair.begun", subject="trainer", onset_step=58, restored_step=55)
        world.journal.record("trainer.restored", subject="trainer", global_step=55)
    for step in range(60, 66):
        world.step(step, reward=0.0, high=0.0)
    answer = use(world, lambda monitor: (monitor.admit(batch(66)), monitor.report().incident))
    expected = (Cause.REWARD_COLLAPSE, "policy") if is_undone else (Cause.SERVER_STALE, "server-0")
    assert (answer[1].cause, answer[1].subject) == expected


@pytest.mark.parametrize("earned_between", [None, 0.5])
def test_a_successor_knows_what_the_restore_before_left_open(world, earned_between):
    """It took two restores that one cause outside the weights had made for two collapses, and let good checkpoints be
    condemned (P12). Of two in a row that do contradict nothing is left over from the first."""
    world.config.gate.max_reward_jump = None
    world.steps(40)
    for step, earned in [(19, 0.12), (19, earned_between), (9, 0.02)]:
        if earned is None:
            continue
        world.journal.record("repair.begun", subject="trainer", onset_step=step + 1, restored_step=step)
        world.journal.record("trainer.restored", subject="trainer", global_step=step)
        first = batch(step + 1, mean_reward=earned)
        answer = use(world, lambda monitor, first=first: (monitor.admit(first), monitor.report().incident))[1]
        if step == 19:
            assert answer is None, "alone it is too little"
    expected = Cause.OUTSIDE_WEIGHTS if earned_between is None else None
    assert (answer and answer.cause) is expected
