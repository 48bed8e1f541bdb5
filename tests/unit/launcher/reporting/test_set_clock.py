"""A clock that is set, forward or back, moves no restore: the report and every other reader order the files alike."""

import numpy as np
import pytest

from actors.foreign.foreign_steps import ForeignSteps, standing_lines
from launcher.adapters.trainer_adapter import StepSeen
from launcher.checkpoints.recorded_health import read_health
from launcher.diagnosis.judging.step_history import passes_of
from launcher.diagnosis.reading.inputs import find_inputs, read_inputs
from launcher.reporting.run_facts import read_facts
from launcher.run_files.journal import Journal, append_line, read_lines
from launcher.run_files.run_paths import RunPaths
from scripts import diagnose
from scripts.health.recorded_run import read_run

T0 = 1_790_000_000.0
pytestmark = pytest.mark.parametrize("set_by_s", [3600.0, -3600.0, 0.0])


class Run:
    """Writes a run's files under a clock that a test sets."""

    def __init__(self, folder):
        self.paths = RunPaths(fileroot=folder, user="u", experiment_name="exp", trial_name="t0")
        self.paths.logs.mkdir(parents=True)
        self.now = 0.0
        self.wrong_by = 0.0
        self.lineage = 0
        self.attempt = 1
        self.tell("run.started")
        self.restore(-1)

    def _head(self):
        self.now += 10.0
        return {"time": T0 + self.now + self.wrong_by, "attempt": self.attempt}

    def tell(self, name, **facts):
        append_line(self.paths.events, self._head() | {"event": name, "monotonic": self.now} | facts)

    def restore(self, step, **facts):
        self.lineage += 1
        self.tell("trainer.restored", global_step=step, lineage=self.lineage, reason=f"to step {step}", **facts)

    def step(self, *steps, reward=0.5):
        for step in steps:
            rewards = {"rollout/reward": reward, "grpo_actor/task_reward/avg": reward}
            figures = {"lineage": self.lineage, "policy_version": step + 1, "timeperf/step_s": 10.0}
            append_line(self.paths.metrics, self._head() | {"global_step": step} | figures | rewards)

    def begin_again(self):
        self.attempt = self.attempt + 1
        self.lineage = 0
        self.tell("run.started")


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def current(facts):
    kept = facts.kept_lines()
    assert kept.sum() == len(facts.steps)
    return [line.step for line in facts.steps]


def diagnosed(paths):
    """The steps that the diagnosis of the run's folder takes for the current ones."""
    steps = read_inputs(find_inputs([paths.logs])).steps
    return steps.steps[passes_of(steps)[-1].rows].tolist()


def test_a_restore_that_no_step_has_followed(run, set_by_s):
    run.step(*range(10))
    run.wrong_by = set_by_s
    run.restore(4, incident=1)
    facts = read_facts(run.paths)
    assert current(facts) == [0, 1, 2, 3, 4]
    assert [[line.step for line in one] for one in facts.taken_back] == [[5, 6, 7, 8, 9]]
    assert [(one.step, one.steps_back) for one in facts.restores] == [(4, 5)]
    assert read_health(run.paths).last_step == facts.steps[-1].step
    assert read_run(run.paths)[1].last_step == 4
    assert diagnosed(run.paths) == [0, 1, 2, 3, 4]


def test_a_restore_after_which_the_run_went_on(run, set_by_s):
    run.step(*range(10))
    run.wrong_by = set_by_s
    run.restore(4)
    run.wrong_by = 0.0
    run.step(5, 6)
    facts = read_facts(run.paths)
    assert current(facts) == list(range(7))
    assert [(one.step, one.steps_back) for one in facts.restores] == [(4, 5)]
    assert read_health(run.paths).last_step == 6
    assert diagnosed(run.paths) == list(range(7))


def test_a_restore_in_an_attempt_of_its_own(run, set_by_s):
    run.step(*range(10))
    run.wrong_by = set_by_s
    run.begin_again()
    run.restore(7)
    facts = read_facts(run.paths)
    assert current(facts) == list(range(8))
    assert [(one.step, one.steps_back) for one in facts.restores] == [(7, 2)]
    assert read_health(run.paths).last_step == 7
    assert read_run(run.paths)[1].last_step == 7
    assert diagnosed(run.paths) == list(range(8))


def test_a_diagnosis_says_that_the_steps_went_back_before_the_next_one_came(run, set_by_s, capsys):
    """It took the steps that the restore had undone for the run as it is."""
    run.step(*range(20))
    run.wrong_by = set_by_s
    run.restore(9)
    diagnose.main([str(run.paths.logs)])
    assert "the steps went back once: 19 → 10" in " ".join(capsys.readouterr().out.split())


def test_an_incident_lies_among_the_steps_of_its_restore(run, set_by_s):
    run.step(*range(10))
    run.wrong_by = set_by_s
    run.restore(4)
    run.step(5, 6, 7)
    run.tell("incident.began", incident=1, cause="reward_collapse", subject="policy", onset_step=6)
    run.step(8)
    run.tell("incident.ended", incident=1, cause="reward_collapse", is_mended=True)
    facts = read_facts(run.paths)
    (one,) = facts.incidents
    assert (one.detected_s, one.next_step_s, one.repaired_s) == (20.0, 30.0, 40.0)
    assert facts.losses.bad_steps == 2, "steps 6 and 7"


def test_how_long_is_not_said_across_a_clock_that_was_set(run, set_by_s):
    run.step(*range(3))
    run.tell("incident.began", incident=1, cause="server_crash", subject="server-0")
    run.wrong_by = min(set_by_s, 0.0)
    run.tell("incident.ended", incident=1, cause="server_crash", is_mended=True)
    (one,) = read_facts(run.paths).incidents
    assert one.repaired_s == (None if set_by_s < 0 else 10.0)


def test_another_projects_trainer(run, set_by_s, monkeypatch):
    clock = [T0]
    monkeypatch.setattr("actors.foreign.foreign_steps.time.time", lambda: clock[0])
    journal = Journal(run.paths.events, 2, lambda: clock[0])
    steps = ForeignSteps(run.paths, 2, list(read_lines(run.paths.events)))
    for step in range(1, 8):
        clock[0] += 10.0
        steps.take_step(StepSeen(step=step, reward=0.5), clock[0])
    steps.write()
    clock[0] += set_by_s
    steps.lineage += 1
    journal.record("trainer.restored", subject="trainer", global_step=3, lineage=steps.lineage)
    steps.begin(3)
    assert [line["global_step"] for line in standing_lines(read_lines(run.paths.events), run.paths.metrics)] == [
        1,
        2,
        3,
    ]
    assert [line.step for line in read_facts(run.paths).steps] == [1, 2, 3]
    again = ForeignSteps(run.paths, 2, list(read_lines(run.paths.events)))
    assert (again.lineage, again.last_step) == (1, 3)


def test_what_came_after_the_facts_were_read_is_not_undone_by_an_earlier_restore(run, set_by_s):
    """The page reads the figures more often than the facts: a restore to step 4 is over once step 5 is there."""
    run.step(*range(10))
    run.wrong_by = set_by_s
    run.restore(4)
    facts = read_facts(run.paths)
    facts.figures.add(5, {"rollout/reward": 0.5})
    assert np.flatnonzero(facts.kept_lines()).tolist() == [0, 1, 2, 3, 4, 10]
