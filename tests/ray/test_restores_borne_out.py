"""A reward function that breaks where no known answer is asked: the run's own record names it, and nothing is lost."""

import json

import pytest

from launcher.run_files.journal import read_lines
from tests.programs.supervised_run import DEADLINE_S, SupervisedRun
from tests.support.machine import scaled

pytestmark = pytest.mark.timeout(900)

NO_KNOWN_ANSWERS = ("gate.canaries=0",)


def steps(run):
    return [line["global_step"] for line in read_lines(run.paths.ledger)]


def test_rewards_of_0_are_the_reward_functions_and_the_same_command_resumes(tmp_path):
    """As tried from outside: every answer is 0 from some step on, without known answers. Nothing is condemned, nothing
    begun anew, and after the halt for want of a repair the same command resumes from the last step."""
    settings = (*NO_KNOWN_ANSWERS, "reward_health.verifier_patience_s=4.0", "reward_health.zero_breaker_steps=4")
    with SupervisedRun(tmp_path, steps=30, servers=1, settings=settings) as run:
        run.wait_steps(16)
        run.break_reward("zero")
        run.process.wait(scaled(DEADLINE_S))
        assert run.process.returncode == 3, f"{run.said()}\n{run.tail()}"
        assert run.incidents()[max(run.incidents())][:2] == ("verifier_broken", "reward"), run.tail()
        assert "the reward function is broken" in run.said()
        assert "completions of healthy steps were scored 0, not" in run.said()
        for name in ("checkpoint.condemned", "health.reward_collapse", "health.outside_weights"):
            assert run.events(name) == [], name
        assert [event["global_step"] for event in run.events("trainer.restored")] == [-1], "only the beginning"
        kept = json.loads((run.paths.logs / "recorded_answers.json").read_text())
        assert len(kept) >= 8
        assert len({one["step"] for one in kept}) > 1
        last = run.steps_done() - 1
        run.wait_gone()

    quick = (*NO_KNOWN_ANSWERS, "reward_health.canary_clear_rounds=2")
    with SupervisedRun(tmp_path, steps=30, servers=1, settings=quick) as again:
        again.switch.unlink()
        again.finish()
        again.check_ledger()
        assert steps(again) == list(range(30)), "no step was taken twice"
        resumed = again.events("trainer.restored")[-1]
        assert resumed["global_step"] == last
