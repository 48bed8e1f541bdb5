"""Batches that a failure spoilt, in the step loop: dropped or refused, and no weight moves."""

import dataclasses
import math

import pytest

from launcher.base.errors import RewardError, TrainerError
from launcher.base.messages import Cause
from launcher.config.schema import OptimizerConfig
from tests.support.hot_optimizer import POISON
from tests.support.replay import Replay, prompts
from tests.support.worlds.training import N_PROMPTS, SAMPLES, Trial, poison


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"reward": None}, {"reward": math.nan}, {"weight_version": 2}])
def test_a_bad_batch_costs_its_rollouts_and_never_a_prompt(tmp_path, change):
    trial = Trial(tmp_path, steps=5, rollouts=Replay(prompts(N_PROMPTS), SAMPLES, spoil=poison(3, **change)))
    before = {}
    trial.loop._publish = lambda version: before.setdefault(version, trial.weights())
    assert trial.run()
    (rejected,) = trial.events("batch.rejected")
    assert rejected["global_step"] == 3
    assert sorted(i for r in trial.reports for i in r.prompt_ids) == sorted(prompts(N_PROMPTS))
    assert [r.policy_version for r in trial.reports] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_batch_whose_gradient_is_not_finite_is_vetoed_before_the_optimizer_moves(tmp_path):
    overflow = poison(3, logprobs=-1e38)  # finite for the gate; the ratio is not
    trial = Trial(tmp_path, steps=5, rollouts=Replay(prompts(N_PROMPTS), SAMPLES, spoil=overflow))
    seen = {}
    trial.loop._publish = lambda version: seen.setdefault(version, trial.weights())
    assert trial.run()
    assert len(trial.events("batch.rejected")) == 1
    assert all(t.isfinite().all() for t in trial.weights().values())
    assert sorted(i for r in trial.reports for i in r.prompt_ids) == sorted(prompts(N_PROMPTS))


@pytest.mark.slow
def test_a_later_part_of_a_batch_that_is_not_finite_is_vetoed_and_leaves_no_trace(tmp_path):
    spoilt = Replay(prompts(N_PROMPTS), SAMPLES, spoil=poison(3, at=-1, logprobs=-1e38))
    trial = Trial(tmp_path, steps=5, recipe={"ppo_n_minibatches": 2}, rollouts=spoilt)
    assert trial.run()
    (rejected,) = trial.events("batch.rejected")
    assert rejected["global_step"] == 3
    assert sorted(i for r in trial.reports for i in r.prompt_ids) == sorted(prompts(N_PROMPTS))


@pytest.mark.slow
def test_non_finite_twice_in_a_row_halts_and_leaves_the_checkpoint_that_stands(tmp_path):
    def always(batch):
        return poison(5, logprobs=-1e38)(batch)

    trial = Trial(tmp_path, rollouts=Replay(prompts(N_PROMPTS), SAMPLES, spoil=always))
    with pytest.raises(TrainerError, match="step 5"):
        trial.run()
    assert trial.store.list()[-1].global_step == 3


@pytest.mark.slow
def test_rewards_that_overflow_accuse_the_reward_function_and_not_the_weights(tmp_path):
    def overflow(batch):  # each reward is finite, the mean of two is not
        rewards = ((1.0 + n / 100) * 1e308 for n in range(SAMPLES))
        group = batch.groups[0]
        huge = [dataclasses.replace(one, reward=reward) for one, reward in zip(group.rollouts, rewards, strict=True)]
        return dataclasses.replace(batch, groups=(dataclasses.replace(group, rollouts=tuple(huge)), *batch.groups[1:]))

    left = [True]

    def once(batch):
        return overflow(batch) if batch.weight_versions == (3,) and left and left.pop() else batch

    trial = Trial(tmp_path, steps=5, rollouts=Replay(prompts(N_PROMPTS), SAMPLES, spoil=once))
    assert trial.run()
    (rejected,) = trial.events("batch.rejected")
    assert rejected["cause"] == Cause.VERIFIER_BROKEN
    assert "have no finite advantages" in rejected["reason"]

    def always(batch):
        return overflow(batch) if batch.weight_versions == (5,) else batch

    lasting = Trial(tmp_path / "lasting", rollouts=Replay(prompts(N_PROMPTS), SAMPLES, spoil=always))
    with pytest.raises(RewardError, match=r"step 5.*no finite advantages"):
        lasting.run()
    assert all(t.isfinite().all() for t in lasting.weights().values())


@pytest.mark.slow
def test_weights_that_the_optimizer_ruined_are_committed_published_and_saved_nowhere(tmp_path, monkeypatch):
    poison = tmp_path / "poison"
    monkeypatch.setenv(POISON, str(poison))
    published = []

    def publish(version):
        published.append(version)
        if version == 4:
            poison.touch()

    poisoned = OptimizerConfig(type="tests.support.hot_optimizer:PoisonedAdamW")
    trial = Trial(tmp_path, publish=publish, recipe={"optimizer": poisoned})
    with pytest.raises(TrainerError, match=r"step 4: .*not finite: the weights after the optimizer's step"):
        trial.run()
    assert not poison.exists()
    assert published == [1, 2, 3, 4]
    assert [report.global_step for report in trial.reports] == [0, 1, 2, 3]
    assert trial.store.list()[-1].global_step == 3
