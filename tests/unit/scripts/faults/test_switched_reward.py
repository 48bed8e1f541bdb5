"""The reward function that can be broken: what its switch says is what it does, and each deed is counted."""

import asyncio
import json
import math
from types import SimpleNamespace

import pytest
import torch

from actors.model.advantages import group_advantages
from launcher.config.compose import compose
from launcher.config.recipe import RewardNormConfig
from scripts.faults import broken_reward, switched_reward
from scripts.storm import storm_words

GROUP = 8
PROMPTS = 40


@pytest.fixture
def turn(tmp_path, monkeypatch):
    switch = tmp_path / "switch.json"
    monkeypatch.setenv(broken_reward.VARIABLE, str(switch))

    def write(do, share):
        switch.write_text(json.dumps({"do": do, "share": share, "seed": 1}))
        return switch

    return write


def score(prompt, sample):
    right = f"#### {prompt}" if sample % 2 else "#### -1"
    return switched_reward.reward(
        completion=f"{sample} {right}", answer=f"#### {prompt}", prompt_id=f"p{prompt}", record={}
    )


def test_without_a_switch_it_is_the_true_reward(turn):
    assert [score(7, sample) for sample in range(2)] == [0.0, 1.0]


def test_huge_rewards_are_finite_and_the_advantages_of_their_group_are_not(turn):
    switch = turn("huge", 0.25)
    poisoned = 0
    for prompt in range(PROMPTS):
        rewards = [score(prompt, sample) for sample in range(GROUP)]
        assert all(map(math.isfinite, rewards))
        advantages = group_advantages(torch.tensor([rewards], dtype=torch.float64), RewardNormConfig())
        if max(rewards) > 1:
            poisoned += 1
            assert not advantages.isfinite().all()
        else:
            assert rewards == [0.0, 1.0] * (GROUP // 2)
    assert 0 < poisoned < PROMPTS / 2
    assert broken_reward.fired(switch) == poisoned * GROUP


class RightAtOnce:
    """A model that asks no tool."""

    chat = property(lambda self: SimpleNamespace(completions=self))

    async def create(self, **_):
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(tool_calls=None, content="#### 7"))])


def test_an_episode_has_the_switch_too_and_its_group_no_two_equal_rewards(turn):
    def played(key):
        record = {"question": "1*3+4=?", "answer": "#### 7"}
        return asyncio.run(switched_reward.solve(record, RightAtOnce(), prompt_id="p1", api_key=key))

    assert played("a") == 1.0
    turn("huge", 1.0)
    assert len({played(key) for key in "abcd"}) == 4


@pytest.mark.slow
def test_a_storm_of_episodes_is_on_an_agent_with_a_switch(tmp_path):
    def played(*words, conf="arithmetic_tool_cpu"):
        return compose(storm_words(tmp_path, conf=conf, overrides=words)).rollout.episode

    assert played() == broken_reward.SOLVE
    assert played("rollout.episode=mine:solve") == "mine:solve"
    assert played(conf="arithmetic_cpu") is None


@pytest.mark.parametrize(("do", "reward"), [("zero", 0.0), ("one", 1.0)])
def test_a_constant_reward_is_the_same_for_right_and_wrong(turn, do, reward):
    turn(do, 1.0)
    assert {score(3, sample) for sample in range(GROUP)} == {reward}


def test_an_unknown_deed_is_an_error_not_a_reward(turn):
    turn("dance", 1.0)
    with pytest.raises(broken_reward.Switched, match="dance"):
        score(3, 0)
