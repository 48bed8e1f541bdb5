"""What the driver shows of a run, from its files: each event, step and status once; none that can't be read ends it."""

import dataclasses
import io
import math
import time
from types import SimpleNamespace

import pytest

from launcher.base.messages import EvalReport, TrainerStatus
from launcher.cli.deadlines import Deadlines
from launcher.cli.interrupts import Interrupts
from launcher.cli.run_screen import RunFollower, Screen
from launcher.config.schema import DatasetConfig, RunConfig
from launcher.reporting.current_status import CurrentStatusFile, DriverFacts
from launcher.run_files.journal import Journal, append_line
from launcher.run_files.run_paths import RunPaths

STATUS = TrainerStatus(
    phase="rollout", next_step=2, total_steps=9, steps_per_epoch=9, policy_version=2, pid=1, seconds_in_phase=0.0
)
EVAL = EvalReport(policy_version=2, prompts=1, sampled=0.5, greedy=0.25)


class Shown:
    """A follower whose run's files the test writes; `lines`: what its screen was given for WandB."""

    def __init__(self, folder):
        self.config = RunConfig(experiment_name="view", train_dataset=DatasetConfig(path="none"))
        self.config.cluster.fileroot = str(folder)
        self.paths = RunPaths.of(self.config)
        self.paths.prepare()
        append_line(self.paths.metrics, {"global_step": 0, "attempt": 1, "rollout/reward": 0.1})  # before it began
        self.lines = []
        self.steps_seen = []
        self.journal = Journal(self.paths.events, 2, time.time)
        self.out = io.StringIO()
        self.screen = Screen(self.config, self.paths, self.out)
        self.screen.begin(2)
        self.screen._log = self.lines.append
        self.deadlines = Deadlines(self.config, self.journal, Interrupts())
        memory = SimpleNamespace(look_if_due=self.steps_seen.append)
        self.follower = RunFollower(self.paths, self.journal, self.screen, memory, self.deadlines)
        self.follower.actors = SimpleNamespace(follow=lambda event: None)

    def step(self, number, **figures):
        append_line(self.paths.metrics, {"global_step": number, "attempt": 2, "rollout/reward": 0.5, **figures})

    def tell_status(self, attempt=2, evals=()):
        driver = DriverFacts.of_this_process(self.paths, attempt, address="local", is_detached=False)
        file = CurrentStatusFile(self.paths, driver)
        file.heard(STATUS, (), evals)
        file.write()
        file._writer.join()


@pytest.fixture
def shown(tmp_path):
    made = Shown(tmp_path)
    yield made
    made.screen.leave()


def test_each_step_and_event_is_shown_once_and_those_of_before_are_not(shown, monkeypatch):
    followed = []
    monkeypatch.setattr(shown.screen, "follow", followed.append)
    shown.follower.show()
    shown.step(1)
    shown.tell_status()
    shown.journal.record("run.hold_released", subject="user", reason="")
    shown.follower.show()
    shown.follower.show()
    said = shown.out.getvalue()
    assert said.count("step 2/9") == 1
    assert said.count("the run resumes") == 1
    assert [line["global_step"] for line in shown.lines] == [1]
    assert [event["event"] for event in followed] == ["run.hold_released"]
    assert shown.steps_seen == [0, 1, 1]


def test_figures_that_are_no_numbers_in_json_are_numbers_again(shown):
    shown.step(1, **{"grpo_actor/loss": math.nan, "grpo_actor/grad_norm": math.inf, "note": "NaN or not"})
    shown.follower.show()
    (line,) = shown.lines
    assert math.isnan(line["grpo_actor/loss"])
    assert line["grpo_actor/grad_norm"] == math.inf
    assert line["note"] == "NaN or not"


def test_an_update_lasts_as_long_as_the_last_line_says(shown):
    shown.step(1, **{"timeperf/train_s": 3.0, "timeperf/publish_s": 1.0})
    shown.step(2, **{"timeperf/train_s": 4.0, "timeperf/state_s": 0.5})
    shown.follower.show()
    assert shown.deadlines._took.update_s == 4.5


def test_a_held_out_accuracy_is_told_once(shown):
    for _ in range(2):
        shown.tell_status(evals=(EVAL,))
        shown.follower.show()
    assert shown.out.getvalue().count("held-out accuracy at policy_version 2: sampled 0.500, greedy 0.250") == 1
    assert [line["eval/greedy"] for line in shown.lines] == [0.25]


def test_a_resume_tells_no_held_out_accuracy_of_the_attempt_before_it_again(shown):
    shown.tell_status(attempt=1, evals=(EVAL,))
    shown.screen.leave()
    shown.screen.begin(2)
    measured = dataclasses.replace(EVAL, policy_version=4)
    shown.tell_status(evals=(EVAL, measured))
    shown.follower.show()
    assert shown.out.getvalue().count("held-out accuracy") == 1
    assert [line["global_step"] for line in shown.lines] == [3]


@pytest.mark.parametrize("content", [None, "{", "of another attempt"])
def test_a_status_that_can_not_be_had_costs_the_panel_alone(shown, content):
    if content == "of another attempt":
        shown.tell_status(attempt=1)
    elif content is not None:
        shown.paths.now.write_text(content)
    shown.step(1)
    shown.follower.show()
    assert "step" not in shown.out.getvalue()
    assert [line["global_step"] for line in shown.lines] == [1]
    shown.tell_status()
    shown.follower.show()
    assert "step 2/9" in shown.out.getvalue()
