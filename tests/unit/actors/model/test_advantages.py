"""Rewards to advantages against values worked by hand, and against TRL's figures."""

import json
import math
from pathlib import Path

import pytest
import torch

from actors.model.advantages import batch_normalised, group_advantages, kl_to_come, overlong_penalty
from launcher.config.recipe import AdvNormConfig, RewardNormConfig

TRL = json.loads((Path(__file__).parent / "data" / "trl_figures.json").read_text())
GROUP_MEAN = RewardNormConfig(std_level=None)


def test_advantages_without_the_deviation_are_the_distance_from_the_groups_mean():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 0.0, 0.0, 1.0]])
    expected = torch.tensor([[0.5, -0.5, -0.5, 0.5], [2.0, -1.0, -1.0, 0.0]])
    assert torch.equal(group_advantages(rewards, GROUP_MEAN), expected)


def test_advantages_with_the_deviation_use_the_unbiased_one():
    # mean 1, squares 4 + 1 + 1 + 0 = 6, variance 6 / 3 = 2
    advantages = group_advantages(torch.tensor([[3.0, 0.0, 0.0, 1.0]]), RewardNormConfig(eps=0.0))
    expected = torch.tensor([[2.0, -1.0, -1.0, 0.0]]) / math.sqrt(2)
    torch.testing.assert_close(advantages, expected)


def test_eps_is_added_to_the_deviation():
    # mean 0.5, unbiased standard deviation sqrt(0.5)
    advantages = group_advantages(torch.tensor([[1.0, 0.0]]), RewardNormConfig(eps=0.1))
    torch.testing.assert_close(advantages, torch.tensor([[0.5, -0.5]]) / (math.sqrt(0.5) + 0.1))


@pytest.mark.parametrize("norm", [RewardNormConfig(), GROUP_MEAN, RewardNormConfig(std_level="batch")])
def test_equal_rewards_teach_exactly_nothing(norm):
    rewards = torch.full((1, 7), 0.1)
    assert (rewards - rewards.mean()).any(), "the trap: this mean is off in its last bit"
    assert torch.equal(group_advantages(rewards, norm), torch.zeros(1, 7))


def test_a_group_of_one_has_no_advantage():
    assert torch.equal(group_advantages(torch.tensor([[1.0]]), RewardNormConfig()), torch.zeros(1, 1))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_shows_in_its_group_and_only_there(bad):
    advantages = group_advantages(torch.tensor([[1.0, bad], [1.0, 0.0]]), RewardNormConfig())
    assert not advantages[0].isfinite().any()
    assert advantages[1].isfinite().all()


def test_advantages_equal_trls():
    rewards = torch.tensor(TRL["rewards"])
    expected = (rewards - rewards.mean(dim=1, keepdim=True)) / (torch.tensor(TRL["reward_std"])[:, None] + 1e-4)
    torch.testing.assert_close(group_advantages(rewards, RewardNormConfig(eps=1e-4)), expected)


def test_mean_and_deviation_have_a_level_each():
    rewards = torch.tensor([[3.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    batch = group_advantages(rewards, RewardNormConfig(mean_level="batch", std_level=None))
    assert batch.tolist() == [[2.0, 0.0], [-1.0, -1.0]]
    # about the groups' means: squares 1 + 1 + 0 + 0 over 3
    mixed = group_advantages(rewards, RewardNormConfig(mean_level="group", std_level="batch", eps=0.0))
    torch.testing.assert_close(mixed, torch.tensor([[1.0, -1.0], [0.0, 0.0]]).double() / math.sqrt(2 / 3))
    plain = group_advantages(rewards, RewardNormConfig(mean_level=None, std_level=None))
    assert torch.equal(plain, rewards)


def test_the_penalty_grows_in_the_last_tokens_only():
    lengths = torch.tensor([1.0, 60.0, 80.0, 100.0])
    penalty = overlong_penalty(lengths, max_tokens=100, overlong_tokens=40, factor=0.5)
    assert penalty.tolist() == [0.0, 0.0, -0.25, -0.5]


def test_the_kl_to_come_ends_with_the_sequence():
    kl = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    assert kl_to_come(kl, torch.tensor([0, 0, 0, 5, 5])).tolist() == [7.0, 6.0, 4.0, 24.0, 16.0]
    assert kl_to_come(kl[:0], torch.tensor([], dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize("cut", [[5], [2, 3], [1, 0, 4]])
def test_tokens_are_normalised_over_all_parts_and_over_what_counts(cut):
    advantages, counted = torch.tensor([3.0, 100.0, 0.0, 0.0, 1.0]), torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0]).double()
    norm = AdvNormConfig(mean_level="batch", std_level="batch", eps=0.0)
    parts = batch_normalised(advantages.split(cut), counted.split(cut), norm, total=lambda here: here)
    expected = torch.tensor([2.0, 99.0, -1.0, -1.0, 0.0]) / math.sqrt(2)  # mean 1, squares 4 + 1 + 1 + 0 over 3
    torch.testing.assert_close(torch.cat(parts), expected)
