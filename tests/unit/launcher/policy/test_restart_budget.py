"""Repairs are tried from small to large, with pauses, a budget each, and a last word."""

import dataclasses
import itertools
import random

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from launcher.base.messages import Cause
from launcher.config.supervision import RestartConfig
from launcher.policy.restart_budget import (
    LADDERS,
    RepairAttempt,
    Rung,
    budget_of,
    next_repair,
    restored_nothing,
    still_counted,
)

SETTINGS = RestartConfig()
CRASH = Cause.SERVER_CRASH


def attempts(*rungs, cause=CRASH, subject="s0", start=100.0, every=5.0):
    return [
        RepairAttempt(at=start + every * number, cause=cause, subject=subject, rung=rung)
        for number, rung in enumerate(rungs)
    ]


def decide(history, *, cause=CRASH, subject="s0", now=200.0, progress_at=None, without=frozenset(), settings=SETTINGS):
    return next_repair(cause, subject, history, settings, now=now, progress_at=progress_at, without=without)


SERVER, RESTORE, RETRY = Rung.SERVER, Rung.RESTORE, Rung.RETRY
EVERYTHING = [SERVER] * 3


@pytest.mark.parametrize(
    ("history", "rung"),
    [
        ([], SERVER),
        (attempts(SERVER), SERVER),
        (attempts(SERVER, SERVER), SERVER),
        (attempts(*EVERYTHING), Rung.HALT),
        (attempts(*EVERYTHING, subject="s1"), SERVER),  # another's restarts
        (attempts(*EVERYTHING, cause=Cause.SERVER_HANG), SERVER),  # another cause
    ],
)
def test_the_ladder_is_climbed_rung_by_rung(history, rung):
    assert decide(history).rung is rung


def test_progress_refills_and_a_quiet_window_forgets():
    spent = attempts(*EVERYTHING)
    assert decide(spent, progress_at=99.0).rung is Rung.HALT
    assert decide(spent, progress_at=150.0).rung is SERVER
    assert decide(spent, now=110.0 + SETTINGS.window_s).rung is Rung.HALT
    assert decide(spent, now=110.1 + SETTINGS.window_s).rung is SERVER


def test_failures_close_together_belong_together_however_long_they_go_on():
    spread = attempts(*EVERYTHING, every=SETTINGS.window_s)
    assert decide(spread, now=spread[-1].at + 1).rung is Rung.HALT


@pytest.mark.parametrize(("tries", "wait_s"), [(0, 0), (1, 1), (2, 2), (3, 4), (4, 8), (6, 32), (7, 60), (500, 60)])
def test_waits_double_up_to_the_cap(tries, wait_s):
    history = attempts(*[SERVER] * tries)
    repair = decide(history, settings=RestartConfig(server=1000), now=history[-1].at + 1 if history else 200.0)
    assert repair.not_before == (history[-1].at + wait_s if history else 200.0)


def test_rungs_that_cannot_help_are_left_out():
    lost = {"cause": Cause.NODE_LOST}
    assert decide([], **lost, without=frozenset({SERVER})).rung is RESTORE, "the trainer's part of it"
    spent = attempts(*EVERYTHING, cause=Cause.NODE_LOST)
    assert decide(spent, **lost, without=frozenset({RESTORE})).rung is Rung.HALT, "a server's"
    nothing = decide([], without=frozenset({SERVER}))
    assert nothing.reason.endswith("nothing can help here")


def test_every_cause_has_a_ladder_that_ends():
    assert set(LADDERS) == set(Cause)
    order = list(Rung)
    for ladder in LADDERS.values():
        assert ladder[-1] is Rung.HALT
        assert [order.index(rung) for rung in ladder] == sorted({order.index(rung) for rung in ladder})


class Budgets(RuleBasedStateMachine):
    """Failures of any cause and subject, progress at times, time going by; beside it a plain count of what was done."""

    settings = RestartConfig(retry=2, server=2, restore=2, window_s=1000.0)
    subjects = ("s0", "s1")

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.history = []
        self.progress_at = None
        self.without_progress = 0

    @rule(cause=st.sampled_from(Cause), subject=st.sampled_from(subjects))
    def fail(self, cause, subject):
        repair = next_repair(cause, subject, self.history, self.settings, now=self.now, progress_at=self.progress_at)
        again = next_repair(cause, subject, self.history, self.settings, now=self.now, progress_at=self.progress_at)
        assert repair == again
        assert repair.rung in LADDERS[cause]
        assert repair.not_before <= self.now + self.settings.wait_max_s
        if repair.rung is Rung.HALT:
            return
        self.now = max(self.now, repair.not_before)
        self.history.append(RepairAttempt(at=self.now, cause=cause, subject=subject, rung=repair.rung))
        self.without_progress += 1

    @rule(seconds=st.floats(0.0, 50.0))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def get_further(self):
        self.now += 0.1
        self.progress_at = self.now
        self.without_progress = 0

    @precondition(lambda self: self.without_progress == 0)
    @invariant()
    def progress_refills(self):
        for cause in Cause:
            repair = next_repair(cause, "s0", self.history, self.settings, now=self.now, progress_at=self.progress_at)
            assert repair.rung is LADDERS[cause][0]
            assert repair.not_before <= self.now or repair.rung is Rung.ATTEMPT, "which waits from the first on"

    @invariant()
    def budgets_hold(self):
        recent = [a for a in self.history if self.progress_at is None or a.at > self.progress_at]
        for cause, subject, rung in itertools.product(Cause, self.subjects, (SERVER, RESTORE)):
            spent = sum(a.cause is cause and a.rung is rung and a.subject == subject for a in recent)
            assert spent <= budget_of(rung, self.settings)

    @invariant()
    def trouble_without_progress_ends(self):
        rungs = [r for cause in Cause for subject in self.subjects for r in LADDERS[cause] if r is not RETRY]
        larger = sum(budget_of(rung, self.settings) for rung in rungs)
        assert self.without_progress <= larger * (1 + len(Cause) * len(self.subjects) * self.settings.retry)

    def teardown(self):
        """Whatever came before: with no further progress, each cause comes to its last word."""
        for cause, subject in itertools.product(Cause, self.subjects):
            for _ in range(200):
                repair = next_repair(
                    cause, subject, self.history, self.settings, now=self.now, progress_at=self.progress_at
                )
                if repair.rung is Rung.HALT:
                    break
                self.now = max(self.now, repair.not_before)
                self.history.append(RepairAttempt(at=self.now, cause=cause, subject=subject, rung=repair.rung))
            assert repair.rung is Rung.HALT


TestBudgets = Budgets.TestCase
TestBudgets.settings = hypothesis_settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True)


def test_the_wait_is_for_one_s_own_attempts_and_retries_of_others_are_not_one_s_own():
    def attempt(subject, rung, at, cause=Cause.SERVER_CRASH):
        return RepairAttempt(at=at, cause=cause, subject=subject, rung=rung)

    settings = RestartConfig()
    others = [attempt("s1", Rung.SERVER, 990.0), attempt("s1", Rung.SERVER, 995.0)]
    first = next_repair(Cause.SERVER_CRASH, "s0", others, settings, now=1000.0, progress_at=None)
    assert (first.rung, first.not_before) == (Rung.SERVER, 1000.0)
    own = [attempt("s0", Rung.SERVER, 900.0), *others]
    second = next_repair(Cause.SERVER_CRASH, "s0", own, settings, now=1000.0, progress_at=None)
    assert second.not_before == 901.0
    stale = [attempt("s0", Rung.RETRY, 900.0 + n, Cause.SERVER_STALE) for n in range(settings.retry)]
    between = [*stale, attempt("s1", Rung.SERVER, 950.0)]
    after = next_repair(Cause.SERVER_STALE, "s0", between, settings, now=1000.0, progress_at=None)
    assert after.rung is Rung.SERVER, "a restart of another server made no new situation for this one"


@pytest.mark.parametrize(("before", "wait_s"), [(0, 30.0), (1, 60.0), (3, 240.0), (5, 960.0)])
def test_another_attempt_of_the_run_waits_twice_as_long_each_time(before, wait_s):
    history = attempts(*[Rung.ATTEMPT] * before, cause=Cause.RUN_HALTED, subject="run", start=150.0)
    found = decide(history, cause=Cause.RUN_HALTED, subject="run")
    assert (found.rung, found.not_before) == (Rung.ATTEMPT, 200.0 + wait_s)


def test_and_no_longer_than_half_of_the_window_after_which_all_is_forgotten():
    settings = dataclasses.replace(SETTINGS, window_s=100.0)
    history = attempts(*[Rung.ATTEMPT] * 3, cause=Cause.RUN_HALTED, subject="run", start=185.0)
    assert decide(history, cause=Cause.RUN_HALTED, subject="run", settings=settings).not_before == 250.0


def test_a_restart_waits_for_the_later_of_its_own_cause_and_of_whatever_was_done_to_it():
    settings = dataclasses.replace(SETTINGS, wait_initial_s=8.0, wait_max_s=100.0)
    of_its_cause, of_another = (
        attempts(SERVER, start=180.0),
        attempts(SERVER, SERVER, cause=Cause.SERVER_HANG, start=185.0),
    )
    assert decide(of_its_cause, settings=settings).not_before == 188.0
    assert decide(of_its_cause + of_another, settings=settings).not_before == 190.0 + 8.0 * 4
    of_the_other = attempts(SERVER, subject="s1", start=195.0)
    assert decide(of_its_cause + of_the_other, settings=settings).not_before == 188.0
    retried = attempts(RETRY, RETRY, cause=Cause.SERVER_STALE, start=190.0)
    assert decide(retried, settings=settings).not_before == 200.0, "a retry restarts nothing"


@pytest.mark.parametrize(
    ("step", "left"),
    [(9, [9, None, 19, None]), (19, [9, 9, None, None]), (29, [9, 9, 19, None]), (None, [9, 9, 19, None])],
)
def test_only_the_last_restore_of_a_step_restored_nothing_where_it_failed(step, left):
    made = [
        RepairAttempt(at=1.0, cause=CRASH, subject="trainer", rung=RESTORE, restored_step=n) for n in (9, 9, 19, None)
    ]
    assert [one.restored_step for one in restored_nothing(made, step)] == left


@pytest.mark.parametrize("seed", range(8))
def test_what_is_forgotten_would_have_changed_no_decision(seed):
    """Failures of several subjects, each proved now and then, with quiet windows and without."""
    draw = random.Random(seed)
    whole, kept, proved, now = [], [], {}, 0.0
    subjects = {"s0": CRASH, "s1": Cause.SERVER_STALE, "s2": Cause.SERVER_HANG, "trainer": Cause.NONFINITE}
    for _ in range(300):
        now += draw.choice((1.0, 60.0, 600.0, SETTINGS.window_s + 1.0))
        subject = draw.choice(list(subjects))
        if draw.random() < 0.4:
            proved[subject] = now
            kept = still_counted(kept, proved, ())
            continue
        for one, cause in subjects.items():
            made = [
                decide(history, cause=cause, subject=one, now=now, progress_at=proved.get(one))
                for history in (whole, kept)
            ]
            assert made[0] == made[1]
        onset = draw.choice((None, None, 7)) if subject == "trainer" else None
        rung = draw.choice([rung for rung in LADDERS[subjects[subject]] if rung is not Rung.HALT])
        begun = RepairAttempt(at=now, cause=subjects[subject], subject=subject, rung=rung, onset_step=onset)
        whole, kept = [*whole, begun], [*kept, begun]
    assert len(kept) < len(whole) / 2
    assert [one for one in kept if one.onset_step] == [one for one in whole if one.onset_step]


def test_a_subject_that_was_given_up_keeps_nobody_else_s_repairs():
    history = [*attempts(SERVER, subject="s1"), *attempts(*EVERYTHING, start=200.0)]
    assert still_counted(history, {"s0": 300.0}, {"s1"}) == history[-1:]
    assert still_counted(history, {"s0": 300.0}, ()) == history
    assert still_counted([], {}, ()) == []
