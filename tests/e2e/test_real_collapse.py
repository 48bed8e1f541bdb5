"""The policy itself collapses, with the real SGLang and the real reward function: it is found, and taken back.

tests/ray/test_reward_faults.py shows it with weights that are changed by hand.
"""

import os
from statistics import fmean

import pytest

from launcher.reporting.run_facts import read_facts
from launcher.run_files.journal import read_lines
from tests.programs.supervised_run import REAL_SERVERS, SupervisedRun
from tests.support.hot_optimizer import FIRST, MARK, STEPS

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]

AS_ARITHMETIC_CPU = (
    "train_dataset.batch_size=16",
    "gconfig.n_samples=8",
    "gconfig.max_new_tokens=24",
    "reward.fn=actors.reward:gsm8k_reward",
    "actor.optimizer.type=tests.support.hot_optimizer:HotAdamW",
    "actor.optimizer.beta2=0.98",
    "actor.optimizer.warmup_steps=20",
    "reward_health.warmup_steps=15",
)


def test_after_three_steps_at_twenty_times_the_learning_rate_the_run_goes_back_and_learns_on(tmp_path):
    mark = tmp_path / "was_hot"
    environment = os.environ | {REAL_SERVERS: "1", MARK: str(mark)}
    with SupervisedRun(
        tmp_path, steps=FIRST + 20, servers=1, settings=AS_ARITHMETIC_CPU, environment=environment
    ) as run:
        run.finish()
        run.wait_gone()
        assert mark.exists()
        (found,) = run.events("health.reward_collapse")
        assert found["subject"] == "policy"
        assert FIRST <= found["global_step"] <= FIRST + STEPS
        assert found["evidence"]["canaries"] == "known answers scored as they should be"
        assert list(run.incidents().values()) == [("reward_collapse", "policy", True)]
        restored = run.events("trainer.restored")[-1]
        assert 0 <= restored["global_step"] < FIRST, "to before the first hot step"
        (incident,) = read_facts(run.paths).incidents
        assert incident.number == restored["incident"]
        assert incident.steps_back >= found["global_step"] - restored["global_step"]
        run.check_ledger()
        rewards = [(line["global_step"], line["grpo_actor/task_reward/avg"]) for line in read_lines(run.paths.metrics)]
        before = fmean(reward for step, reward in rewards if FIRST - 5 <= step < FIRST)
        assert min(reward for step, reward in rewards if step > FIRST) < before / 2, "its answers were wrong"
        assert fmean(reward for step, reward in rewards if step >= FIRST + 15) > before - 0.15
