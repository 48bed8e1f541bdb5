"""A trainer that hangs is found; one that waits, works hard or saves a large checkpoint is left alone."""

import dataclasses

import pytest

from actors.cluster import node_identity
from actors.supervision.trainer_handle import TrainerWatch
from launcher.base.messages import Cause, Health, TrainerView
from launcher.policy import trainer_liveness
from launcher.policy.trainer_liveness import StepClock, TrainerEvidence, TrainerLook, judge_trainer
from tests.support.worlds.policy import LIMIT_S, MEDIAN_S, SETTINGS, watch


@pytest.mark.parametrize(
    ("fault", "within_s"),
    [
        ({"stopped": True}, SETTINGS.trainer_silence_s + 1),  # T2: SIGSTOP
        ({"mute": True, "idle": True}, LIMIT_S + 1),  # T2: a thread that holds the interpreter
        ({"idle": True}, LIMIT_S + 1),  # a loop that answers and gets nowhere
    ],
)
def test_a_hang_is_found(fault, within_s):
    after_s, verdict = watch(30 + LIMIT_S + 5, **fault)[Health.DEAD]
    assert 0 < after_s <= within_s
    assert verdict.cause is Cause.TRAINER_HANG


@pytest.mark.parametrize(
    "trap",
    [
        {"waits": True},  # the servers are gone: not the trainer's fault
        {"mute": True},  # it works with the interpreter held, and its counter moves
        {"unwatched_s": 100.0},  # the monitor paused
        {"idle": True, "median": None},  # the first step compiles
    ],
)
def test_a_trap_kills_nobody(trap):
    assert Health.DEAD not in watch(30 + 2 * LIMIT_S, **trap)


def test_one_that_sleeps_without_an_answer_is_suspected_but_not_taken_for_stopped():
    first = watch(30 + LIMIT_S - 5, mute=True, asleep=True)
    assert Health.SUSPECT in first
    assert Health.DEAD not in first


def test_did_time_count_while_nobody_looked_a_pause_of_the_monitor_would_kill(monkeypatch):
    monkeypatch.setattr(trainer_liveness, "LONGEST_GAP", 1e9)
    assert Health.DEAD in watch(30 + 2 * LIMIT_S, stopped=True, unwatched_s=100.0)
    monkeypatch.undo()
    after_s, _ = watch(30 + 2 * LIMIT_S, stopped=True, unwatched_s=100.0)[Health.DEAD]
    assert after_s > 100.0


@pytest.mark.parametrize(("step_s", "limit_s"), [(None, 1800.0), (0.5, 60.0), (6.0, 60.0), (30.0, 300.0)])
def test_the_patience_is_in_the_runs_own_steps(step_s, limit_s):
    assert trainer_liveness.progress_limit_s(step_s, SETTINGS) == limit_s


def test_without_evidence_the_trainer_is_unknown():
    assert judge_trainer(None, SETTINGS, 5.0).health is Health.UNKNOWN
    fresh = TrainerEvidence(look=TrainerLook(at=5.0, state="R"))
    assert judge_trainer(fresh, SETTINGS, 5.0).health is Health.UNKNOWN
    assert judge_trainer(fresh, SETTINGS, 50.0).reason == "not looked at for 45.0 s"


# ── as it is seen by its views ──


@pytest.fixture(autouse=True)
def on_node(monkeypatch):
    monkeypatch.setattr(node_identity, "this_node", lambda: "mine")


class Watch:
    """A trainer of quick steps, of another node, so that its views alone tell; `at` what it then is for long."""

    def __init__(self):
        self.now = 0.0
        self.entered = 0
        self.step = 0
        self.pid = 7
        self.watch = TrainerWatch(SETTINGS, clock=lambda: self.now)
        for _ in range(10):
            self.takes_step()

    def takes_step(self):
        for phase in ("rollout", "train", "publish"):
            self.enters(phase)
            self.at(phase, MEDIAN_S / 3)
        self.step += 1

    def enters(self, phase):
        self.entered += 1

    def begins_anew(self):
        """Another process."""
        self.pid += 1
        for phase in ("rollout", "train"):
            self.enters(phase)
            self.at(phase, MEDIAN_S / 3)
        self.step += 1
        self.enters("publish")

    def at(self, phase, seconds, *, answers=True, **seen):
        """The first time at which it was called dead, None: never."""
        until = self.now + seconds
        began = self.now
        while self.now < until:
            self.now += SETTINGS.look_interval_s
            view = TrainerView(
                pid=self.pid, node="other", is_started=True, is_loaded=True, is_allowed=True, is_running=True
            )
            view = dataclasses.replace(view, phase=phase, next_step=self.step, progress=self.entered, **seen)
            self.watch.observe_view(view, heard_at=self.now if answers else began, is_asked=not answers)
            if self.watch.verdict().health is Health.DEAD:
                return self.now - began
        return None


@pytest.mark.parametrize("phase", ["checkpoint", "publish"])
def test_a_checkpoint_or_a_weight_load_far_longer_than_any_step_kills_nobody_and_has_an_end(phase):
    """Nothing shows progress until it is done: a checkpoint of many steps' length ended the trainer each time."""
    watch = Watch()
    watch.enters(phase)
    loading = {"loading": ("server-0",)} if phase == "publish" else {}
    assert watch.at(phase, 10 * LIMIT_S, **loading) is None
    assert watch.at(phase, 2 * SETTINGS.trainer_first_s, **loading) is not None


def test_the_first_publication_of_a_process_may_take_far_longer_and_has_an_end():
    """With several ranks its weights are read again: on a slow disk that passed for a hang, at each new start."""
    watch = Watch()
    watch.begins_anew()
    assert watch.at("publish", 10 * LIMIT_S) is None
    watch.takes_step()
    watch.enters("publish")
    assert watch.at("publish", 2 * LIMIT_S) == pytest.approx(LIMIT_S, abs=2 * SETTINGS.look_interval_s)
    watch.begins_anew()
    assert watch.at("publish", 2 * SETTINGS.trainer_first_s) is not None


@pytest.mark.parametrize("phase", ["train", "publish"])
def test_any_other_stand_still_is_met_after_the_runs_own_steps(phase):
    watch = Watch()
    watch.enters(phase)
    assert watch.at(phase, 2 * LIMIT_S) == pytest.approx(LIMIT_S, abs=2 * SETTINGS.look_interval_s)


ON_ORDER = {"is_allowed": False, "is_running": False}


@pytest.mark.parametrize(
    ("waits", "limit_s"),
    [
        ({"phase": "rollout"}, LIMIT_S),  # no server serves
        ({"phase": "train", "is_at_gate": True}, LIMIT_S),
        ({"phase": "idle", **ON_ORDER}, SETTINGS.trainer_first_s),  # the order may be a restore, which takes long
    ],
)
def test_one_that_waits_and_answers_may_wait_for_ever_and_one_that_hangs_meanwhile_is_found(waits, limit_s):
    """Its interpreter was held, or its threads had locked each other: its last answer, that it waited, excused it for
    ever. Orders to it failed one after another, and no repair came of it."""
    watch = Watch()
    watch.enters("train")
    watch.at("train", MEDIAN_S)  # its steps are known
    assert watch.at(seconds=2 * limit_s, **waits) is None
    assert watch.at(seconds=2 * limit_s, answers=False, **waits) == pytest.approx(limit_s, abs=1.0)


# ── a run that takes no step ──


def told(clock, *, steps, each_s, is_working=True, since=0.0, look_s=1.0):
    """What is said at looks `look_s` apart, with a step every `each_s`, and when the last look was."""
    said, now = [], since
    while now < since + steps * each_s:
        now += look_s
        if text := clock.note(int((now - since) // each_s), is_working=is_working, now=now):
            said.append((now, text))
    return said, now


def test_a_run_without_a_step_for_as_long_as_a_hang_is_said_once_and_so_is_the_step_that_came():
    clock = StepClock(SETTINGS)
    said, now = told(clock, steps=10, each_s=8.0)
    assert (said, clock.is_late) == ([], False)
    late = [
        (at, text) for at in range(int(now) + 1, int(now) + 300) if (text := clock.note(10, is_working=True, now=at))
    ]
    ((at, text),) = late
    assert at - now == pytest.approx(SETTINGS.trainer_factor * 8, abs=1)
    assert text == "no step for 80 s, usually one takes 8.0 s, and no cause is known"
    assert clock.is_late
    assert clock.note(11, is_working=True, now=now + 300) == "a step came after 300 s"
    assert not clock.is_late
    assert sum(bool(clock.note(11, is_working=True, now=now + after)) for after in range(301, 400)) == 1
    assert clock.note(7, is_working=True, now=now + 400) == "the trainer was taken back after 100 s"


def test_time_in_which_the_run_does_not_work_and_time_that_nobody_saw_are_none_of_a_step():
    clock = StepClock(SETTINGS)
    _, now = told(clock, steps=10, each_s=2.0)
    for at in range(1, 1000):
        assert clock.note(10, is_working=False, now=now + at) == ""
    assert clock.note(10, is_working=True, now=now + 10_000) == "", "the machine was suspended"
    assert clock.note(3, is_working=True, now=now + 10_001) == "", "a restore"
    assert not clock.is_late


def test_the_first_step_has_the_time_of_a_first_step():
    clock = StepClock(SETTINGS)
    looks = range(int(SETTINGS.trainer_first_s) + 2)
    assert [at for at in looks if clock.note(0, is_working=True, now=float(at))] == [int(SETTINGS.trainer_first_s)]
