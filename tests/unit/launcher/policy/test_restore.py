"""The checkpoint to go back to is whole, trusted, and from before the damage."""

import dataclasses

import pytest

from launcher.base.messages import Cause, Incident
from launcher.config.supervision import RestoreConfig
from launcher.policy import restore
from launcher.policy.checkpoint_status import CheckpointFacts, CheckpointStatus, worth_keeping
from launcher.policy.restart_budget import RepairAttempt, Rung
from launcher.policy.restore import (
    FIRST_WEIGHTS,
    choose,
)

SETTINGS = RestoreConfig()
GOOD, CANDIDATE, CONDEMNED = CheckpointStatus.GOOD, CheckpointStatus.CANDIDATE, CheckpointStatus.CONDEMNED


def saved(step, status=CANDIDATE, **kwargs):
    return CheckpointFacts(global_step=step, status=status, **kwargs)


SHELF = [saved(19, GOOD), saved(29, GOOD), saved(39, GOOD), saved(49), saved(59)]


def incident(onset, cause=Cause.REWARD_COLLAPSE):
    return Incident(cause=cause, subject="policy", reason="fell", since=1.0, onset_step=onset)


def restored(onset, to, cause=Cause.REWARD_COLLAPSE):
    return RepairAttempt(at=0.0, cause=cause, subject="trainer", rung=Rung.RESTORE, onset_step=onset, restored_step=to)


@pytest.mark.parametrize(
    ("shelf", "what", "step"),
    [
        (SHELF, None, 59),  # the trainer merely died: the newest
        (SHELF, incident(None), 59),
        ([*SHELF[:4], saved(59, is_complete=False)], None, 49),  # T4: torn
        ([*SHELF[:4], saved(59, CONDEMNED)], None, 49),
        ([], None, FIRST_WEIGHTS),
        (SHELF, incident(62), 39),  # certified before newer
        (SHELF, incident(43), 39),
        (SHELF, incident(42), 29),  # the margin: 42 − 1 − 1 − 2 < 39
        (SHELF, incident(35), 29),
        ([saved(9), saved(29)], incident(25), 9),  # a candidate where nothing is certified
        ([saved(29, GOOD), saved(39, GOOD, is_complete=False)], incident(62), 29),
        ([saved(29, GOOD), saved(39, CONDEMNED)], incident(62), 29),
        (SHELF, incident(10), FIRST_WEIGHTS),
        (SHELF, incident(60, Cause.VERIFIER_BROKEN), 59),  # its onset is exact: nothing is thrown away
        (SHELF, incident(59, Cause.VERIFIER_BROKEN), 49),
        (SHELF, incident(51, Cause.NONFINITE), 49),  # step 50 was finite, and so vouches for the weights after 49
        (SHELF, incident(50, Cause.NONFINITE), 39),
    ],
)
def test_the_choice(shelf, what, step):
    assert choose(shelf, what, [], SETTINGS).global_step == step


def test_without_any_from_before_the_onset_the_run_begins_anew_or_halts():
    assert choose(SHELF, incident(10), [], SETTINGS).reason == "there is no checkpoint to trust up to step 6"
    halts = choose(SHELF, incident(10), [], dataclasses.replace(SETTINGS, begin_anew=False))
    assert halts.global_step is None
    assert "restore.begin_anew is off" in halts.reason


def test_a_run_that_had_learned_goes_back_to_what_is_trusted_where_there_is_any():
    learned = dataclasses.replace(incident(62), had_learned=True)
    assert choose(SHELF, learned, [], SETTINGS).global_step == 39


def test_a_run_that_may_not_begin_anew_takes_the_oldest_from_before_the_onset():
    shelf, settings = [saved(19), saved(24)], dataclasses.replace(SETTINGS, begin_anew=False)
    assert choose(shelf, incident(21), [], settings).global_step == 19


def test_a_collapse_again_with_nothing_older_takes_the_oldest_from_before_it_and_the_third_halts():
    """The checkpoint of step 4 was restored, and retention has removed it since."""
    shelf = [saved(9), saved(14), saved(19), saved(24)]
    again = dataclasses.replace(incident(22), had_learned=True)
    choice = choose(shelf, again, [restored(20, 4)], SETTINGS)
    assert choice.global_step == 9
    assert "step 4 was restored before" in choice.reason
    assert choose(shelf, incident(22), [restored(20, 4)], SETTINGS).global_step == FIRST_WEIGHTS, "nothing is lost"
    assert choose(shelf[3:], again, [restored(20, 4)], SETTINGS).global_step is None, "none is from before the onset"
    assert choose(shelf, again, [restored(20, 4), restored(22, 9)], SETTINGS).global_step is None


def test_a_fall_with_nothing_older_than_the_margin_takes_the_oldest_from_before_it():
    """It halted, which loses more than a checkpoint that is close to the estimated onset can."""
    shelf = [saved(19), saved(24), saved(29)]
    fell = dataclasses.replace(incident(21), had_learned=True)
    choice = choose(shelf, fell, [], SETTINGS)
    assert choice.global_step == 19
    assert "close to the onset" in choice.reason
    assert choose(shelf, incident(21), [], SETTINGS).global_step == FIRST_WEIGHTS, "nothing is lost"
    assert choose(shelf[1:], fell, [], SETTINGS).global_step is None, "none is from before the onset"


def test_a_run_without_any_reward_since_its_first_step_is_told_where_to_look():
    before = [restored(0, FIRST_WEIGHTS), restored(0, FIRST_WEIGHTS)]
    assert "the first weights show it too" in choose([], incident(0), before, SETTINGS).reason
    assert "the first weights" not in choose([], incident(1), before, SETTINGS).reason


def test_numbers_that_are_not_finite_again_go_back_as_far_as_a_collapse_would():
    again = [restored(62, 59, Cause.NONFINITE)]
    assert choose(SHELF, incident(62, Cause.NONFINITE), [], SETTINGS).global_step == 59
    assert choose(SHELF, incident(62, Cause.NONFINITE), again, SETTINGS).global_step == 39


@pytest.mark.parametrize(
    ("shelf", "kept"),
    [
        (SHELF, {29, 39, 49, 59}),
        ([saved(9, GOOD), saved(19), saved(29), saved(39)], {9, 19, 29, 39}),  # 19 is the next to be certified
        ([saved(9, GOOD), saved(19, GOOD, is_complete=False), saved(29), saved(39, CONDEMNED)], {9, 29}),
        ([], set()),
    ],
)
def test_retention_never_takes_the_last_good_one(shelf, kept):
    assert worth_keeping(shelf, keep_last=2) == kept


def test_without_looking_at_the_onset_the_damage_would_be_restored(monkeypatch):
    monkeypatch.setattr(restore, "first_damaged", lambda incident: None)
    assert choose(SHELF, incident(42), [], SETTINGS).global_step == 59


def test_a_state_in_memory_is_one_to_go_back_to_and_nothing_for_retention():
    shelf = [*SHELF, saved(63, in_memory=True), saved(64, in_memory=True)]
    choice = choose(shelf, None, (), SETTINGS)
    assert choice.global_step == 64
    assert "the state in memory of step 64" in choice.reason
    assert choose(shelf, incident(64, Cause.VERIFIER_BROKEN), (), SETTINGS).global_step == 63
    assert choose(shelf, incident(64), (), SETTINGS).global_step == 39, "what the estimate may miss is not trusted"
    assert choose(shelf, incident(65, Cause.NONFINITE), (), SETTINGS).global_step == 63
    assert worth_keeping(shelf, keep_last=1) == worth_keeping(SHELF, keep_last=1)


@pytest.mark.parametrize(
    ("before", "step"),
    [
        (restored(82, 39), 29),  # 20 steps away: the same place, so what it was restored to is suspected
        (restored(81, 39), 39),  # 21 steps away
        (dataclasses.replace(restored(82, 39), onset_step=None), 39),
        (dataclasses.replace(restored(82, 39), restored_step=None), 39),
        (dataclasses.replace(restored(82, 39), rung=Rung.RETRY), 39),
        (restored(82, 39, Cause.NONFINITE), 39),
    ],
)
def test_the_same_place_is_so_many_steps_wide_and_only_a_restore_of_the_same_cause_counts(before, step):
    assert choose(SHELF, incident(102), [before], SETTINGS).global_step == step


def test_a_broken_verifier_twice_at_one_place_is_as_exact_as_once():
    """Its onset is the step itself: what came before was trained on true rewards."""
    again = [restored(60, 59, Cause.VERIFIER_BROKEN)]
    assert choose(SHELF, incident(60, Cause.VERIFIER_BROKEN), again, SETTINGS).global_step == 59


def test_retention_keeps_the_next_to_be_certified_from_the_first_step_on_and_the_best():
    assert worth_keeping([saved(0), saved(1), saved(2), saved(3)], keep_last=1) == {0, 3}
    rewards = [saved(9, reward=0.2), saved(19, reward=0.9), saved(29, reward=float("nan")), saved(39, reward=0.9)]
    assert worth_keeping([saved(5, GOOD), *rewards, saved(49, reward=0.1)], keep_last=1) == {5, 9, 39, 49}
    in_memory = saved(60, in_memory=True, reward=5.0)
    assert worth_keeping([saved(5, GOOD), saved(49), in_memory], keep_last=1) == {5, 49}
