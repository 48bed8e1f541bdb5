"""What of a run's past its rewards are judged by: the steps that stand, and whether they are on probation."""

import itertools

import pytest

from actors.monitoring.reward_series import RewardSeries
from launcher.config.supervision import RewardHealthConfig
from launcher.policy.admission import StepFigures
from launcher.policy.reward_health import Level, RewardPoint, judge_rewards
from launcher.run_files.journal import append_line
from launcher.run_files.run_paths import RunPaths


class Past:
    """A run's files, written in the order of the calls."""

    def __init__(self, folder):
        self.paths = RunPaths(fileroot=folder, user="ann", experiment_name="exp", trial_name="t0")
        self.paths.prepare()
        self._times = itertools.count(1000.0)

    def go_back(self, step, **repair):
        self._event("repair.begun", subject="trainer", **repair)
        self._event("trainer.restored", global_step=step)

    def _event(self, name, **facts):
        append_line(self.paths.events, {"time": next(self._times), "event": name, "attempt": 1, **facts})

    def take(self, steps, mean):
        for step in steps:
            line = {"time": next(self._times), "attempt": 1, "global_step": step}
            rewards = {"avg": mean, "min": 0, "max": 1}
            figures = {f"grpo_actor/task_reward/{key}": value for key, value in rewards.items()}
            append_line(self.paths.metrics, line | figures)


@pytest.fixture
def past(tmp_path):
    return Past(tmp_path)


def test_what_went_back_from_an_onset_is_on_probation(past):
    past.go_back(11, cause="nonfinite", onset_step=13, restored_step=11)
    assert RewardSeries.read(past.paths).restored_step == 11
    series = RewardSeries()
    series.restored(11, onset_step=13)
    assert series.restored_step == 11


def test_the_steps_that_a_mistaken_restore_undid_are_the_runs_own_again(past):
    """The next attempt resumed after step 9, and its rewards were compared with those of before step 5."""
    past.take(range(5), 0.2)
    past.take(range(5, 10), 0.8)
    past._event("reward.rebased", global_step=7, before_step=10)
    for _ in range(2):  # its trainer was killed before its first step
        past.go_back(4, cause="reward_collapse", onset_step=8, restored_step=4)
    assert RewardSeries.read(past.paths).next_step == 5
    past._event("health.outside_weights", subject="environment")
    again = RewardSeries.read(past.paths)
    assert (again.next_step, again.base, again.owes_proof) == (10, 7, True)
    past._event("trainer.restored", global_step=8, attempt=2)
    assert [point.mean for point in RewardSeries.read(past.paths).points] == [0.8, 0.8]
    past.take([9], 0.8)
    past._event("health.outside_weights", subject="environment")
    assert RewardSeries.read(past.paths).next_step == 10, "what a restore undid that was borne out stays undone"


@pytest.mark.parametrize(
    "repair",
    [
        {"cause": "checkpoint_corrupt", "onset_step": None, "restored_step": -1},  # the beginning of every run
        {"cause": "trainer_crash", "onset_step": None, "restored_step": None},
        {"cause": "checkpoint_corrupt", "onset_step": None, "restored_step": 46},  # what follows a crash
    ],
)
def test_a_beginning_and_a_crash_are_not(past, repair):
    past.take(range(60), 0.9)
    past.go_back(46, **repair)
    series = RewardSeries.read(past.paths)
    assert (series.restored_step, series.next_step) == (None, 47)
    series.restored(40)
    assert (series.restored_step, series.next_step) == (None, 41)


def test_a_monitor_that_begins_after_a_restore_does_not_find_the_damage_again(past):
    """Only a step that was repeated took the damage back: killed before that step, it was restored from twice."""
    past.take(range(60), 0.9)
    past.take(range(60, 70), 0.0)
    past.go_back(55, cause="reward_collapse", onset_step=60, restored_step=55)
    series, settings = RewardSeries.read(past.paths), RewardHealthConfig()
    assert series.next_step == 56
    assert judge_rewards(series.points, settings, restored_step=series.restored_step).level is Level.SOUND
    past.take(range(56, 65), 0.9)
    again = RewardSeries.read(past.paths)
    assert [step.point.step for step in again.steps] == [*range(65)], "a restore takes back nothing that came later"


def test_a_server_that_dies_during_a_restore_takes_no_proof_from_it(past):
    past.take(range(60), 0.9)
    past._event("repair.begun", subject="trainer", cause="reward_collapse", onset_step=60, restored_step=55)
    past._event("repair.begun", subject="server-0", cause="server_crash", onset_step=None, restored_step=None)
    past._event("trainer.restored", global_step=55)
    assert RewardSeries.read(past.paths).owes_proof


def test_a_dip_after_a_crash_is_judged_as_any_other(past):
    """Seen in a storm: 0.943 to 0.852 for six steps, 4.8 standard errors, and 27 good steps were thrown away."""
    past.take(range(80), 0.94)
    past.go_back(79, cause="trainer_crash", onset_step=None, restored_step=None)
    past.take(range(80, 86), 0.848)
    series, settings = RewardSeries.read(past.paths), RewardHealthConfig()
    assert judge_rewards(series.points, settings, restored_step=series.restored_step).level is Level.SOUND
    assert judge_rewards(series.points, settings, restored_step=79).level is Level.BREAK


def test_a_step_that_is_admitted_again_replaces_what_followed_it():
    series = RewardSeries()
    for step in (0, 1, 2, 1):
        series.admitted(StepFigures(point=RewardPoint(step=step, mean=0.5, low=0.0, high=1.0)))
    assert [step.point.step for step in series.steps] == [0, 1]


def test_a_line_that_was_torn_by_a_crash_is_passed_over(past):
    past.take(range(3), 0.5)
    with past.paths.metrics.open("a") as file:
        file.write('{"global_step": 3, "grpo_actor/task_reward/avg": 0.5, ')
    assert RewardSeries.read(past.paths).next_step == 3


class Told(Past):
    """As a run writes them since its steps say of which restore they are, under a clock that is set while it runs."""

    def __init__(self, folder):
        super().__init__(folder)
        self.clock = lambda: next(self._times)
        self.lineage = 0

    def _event(self, name, **facts):
        self.lineage += name == "trainer.restored"
        facts |= {"lineage": self.lineage} if name == "trainer.restored" else {}
        append_line(self.paths.events, {"time": self.clock(), "event": name, "attempt": 1, **facts})

    def take(self, steps, mean):
        for step in steps:
            figures = {f"grpo_actor/task_reward/{key}": value for key, value in (("avg", mean), ("min", 0), ("max", 1))}
            head = {"time": self.clock(), "attempt": 1, "global_step": step, "lineage": self.lineage}
            append_line(self.paths.metrics, head | figures)


@pytest.mark.parametrize("set_by_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_around_a_restore_moves_it_nowhere(tmp_path, set_by_s):
    """Set forward for a moment, the restore came after all later steps, and undid them; set back, before all earlier
    ones, and undid nothing."""
    past = Told(tmp_path)
    past.go_back(-1, cause="checkpoint_corrupt", onset_step=None)
    past.take(range(60), 0.9)
    past.take(range(60, 70), 0.0)
    right = past.clock
    past.clock = lambda: right() + set_by_s
    past.go_back(55, cause="reward_collapse", onset_step=60, restored_step=55)
    at_once = RewardSeries.read(past.paths)
    assert (at_once.next_step, at_once.owes_proof) == (56, True)
    past.clock = right
    past.take(range(56, 65), 0.9)
    later = RewardSeries.read(past.paths)
    assert (later.next_step, later.owes_proof) == (65, False)
    assert min(one.mean for one in later.points) == 0.9


HOSTILE = (
    {"event": ["trainer.restored"], "global_step": 3},
    {"event": "trainer.restored", "global_step": 2**60},
    {"event": "trainer.restored", "global_step": True},
    {"event": "batch.rejected", "global_step": 4, "cause": ["server_stale"], "subjects": ["server-0"]},
    {"event": "batch.rejected", "global_step": 4, "cause": {}, "subjects": 3},
    {"event": "repair.begun", "restored_step": "3", "onset_step": 4},
    {"event": "restore.evidence", "evidence": {"x": [1.0]}},
    {"event": "restore.evidence", "evidence": {"3": 7}},
    {"event": "restore.evidence", "evidence": [3]},
)


def test_a_damaged_line_ends_no_monitor(past):
    """Its Ray actor failed at each of its starts."""
    past.take(range(10), 0.5)
    for line in HOSTILE:
        append_line(past.paths.events, {"time": 1.0, "attempt": 1} | line)
    for line in (
        *HOSTILE,
        {"event": "trainer.restored", "global_step": 3},
        {"global_step": 2**60},
        {"global_step": "4"},
        {"global_step": True},
    ):
        append_line(past.paths.metrics, {"time": 2000.0, "attempt": 1} | line)
    series = RewardSeries.read(past.paths)
    assert (series.next_step, series.evidence, series.faults) == (10, {}, {})


def test_of_another_attempt_a_clock_says_nothing(tmp_path):
    past = Told(tmp_path)
    past.take(range(30), 0.9)
    append_line(
        past.paths.events, {"time": 10.0, "event": "trainer.restored", "attempt": 2, "global_step": 19, "lineage": 1}
    )
    assert RewardSeries.read(past.paths).next_step == 20


@pytest.mark.parametrize("set_by_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_leaves_the_step_from_which_rewards_are_compared(tmp_path, set_by_s):
    """Set back an hour, or forward: a fall of the new prompts that the monitor had explained ended a sound run when its
    successor did not know."""
    past = Told(tmp_path)
    past.go_back(-1, cause="checkpoint_corrupt", onset_step=None)
    past.take(range(40), 0.9)
    right = past.clock
    past.clock = lambda: right() + set_by_s
    past._event("reward.rebased", subject="data", global_step=38, before_step=40)
    past.clock = right
    past.take(range(40, 50), 0.4)
    assert RewardSeries.read(past.paths).base == 38
