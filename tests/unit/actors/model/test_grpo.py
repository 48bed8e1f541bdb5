"""The formulas against values worked by hand, and against the figures of trl's own loss on the same tensors."""

import json
import math
from pathlib import Path

import pytest
import torch

from actors.model.grpo import clipped_terms, group_advantages, reference_kl, token_weights

TRL = json.loads((Path(__file__).parent / "data" / "trl_figures.json").read_text())


def test_advantages_without_the_deviation_are_the_distance_from_the_groups_mean():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 0.0, 0.0, 1.0]])
    expected = torch.tensor([[0.5, -0.5, -0.5, 0.5], [2.0, -1.0, -1.0, 0.0]])
    assert torch.equal(group_advantages(rewards, std=False, eps=1e-6), expected)


def test_advantages_with_the_deviation_use_the_unbiased_one():
    # mean 1, squares 4 + 1 + 1 + 0 = 6, variance 6 / 3 = 2
    advantages = group_advantages(torch.tensor([[3.0, 0.0, 0.0, 1.0]]), std=True, eps=0.0)
    expected = torch.tensor([[2.0, -1.0, -1.0, 0.0]]) / math.sqrt(2)
    torch.testing.assert_close(advantages, expected)


def test_eps_is_added_to_the_deviation():
    # mean 0.5, unbiased standard deviation sqrt(0.5)
    advantages = group_advantages(torch.tensor([[1.0, 0.0]]), std=True, eps=0.1)
    torch.testing.assert_close(advantages, torch.tensor([[0.5, -0.5]]) / (math.sqrt(0.5) + 0.1))


@pytest.mark.parametrize("std", [True, False])
def test_equal_rewards_teach_exactly_nothing(std):
    rewards = torch.full((1, 7), 0.1)
    assert (rewards - rewards.mean()).any(), "the trap: this mean is off in its last bit"
    assert torch.equal(group_advantages(rewards, std=std, eps=1e-6), torch.zeros(1, 7))


def test_a_group_of_one_has_no_advantage():
    assert torch.equal(group_advantages(torch.tensor([[1.0]]), std=True, eps=1e-6), torch.zeros(1, 1))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_shows_in_its_group_and_only_there(bad):
    advantages = group_advantages(torch.tensor([[1.0, bad], [1.0, 0.0]]), std=True, eps=1e-6)
    assert not advantages[0].isfinite().any()
    assert advantages[1].isfinite().all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, None),
        (1.25, 2.0, -2.5, -2.5, None),  # above 1 + eps_clip, but within eps_clip_higher
        (1.5, 2.0, -2.6, 0.0, "high"),  # 1.3 · 2
        (1.5, -2.0, 3.0, 3.0, None),  # a rising ratio of a bad token is not clipped: min takes the worse
        (0.5, -2.0, 1.6, 0.0, "low"),  # 0.8 · 2
        (0.5, 2.0, -1.0, -1.0, None),
    ],
)
def test_clipped_objective_by_hand(ratio, advantage, loss, gradient, clipped):
    old = torch.tensor([-2.0], dtype=torch.float64)
    logprobs = (old + math.log(ratio)).requires_grad_()
    terms = clipped_terms(logprobs, old, torch.tensor([advantage]).double(), eps_clip=0.2, eps_clip_higher=0.3)
    terms.loss.sum().backward()
    assert terms.loss.item() == pytest.approx(loss)
    assert logprobs.grad.item() == pytest.approx(gradient)  # d loss / d logprob = -A · r, or 0 where clipped
    assert (terms.clipped_low.item(), terms.clipped_high.item()) == (clipped == "low", clipped == "high")
    assert terms.ratio.item() == pytest.approx(ratio)
    assert terms.approx_kl.item() == pytest.approx(ratio - 1 - math.log(ratio))


def test_without_a_higher_clip_it_is_symmetrical():
    terms = clipped_terms(
        torch.tensor([0.0]), torch.tensor([-1.0]), torch.tensor([1.0]), eps_clip=0.2, eps_clip_higher=None
    )
    assert terms.loss.item() == pytest.approx(-1.2)


def test_reference_kl_by_hand():
    # policy 1/2, reference 1/4: exp(log 1/2) - log 1/2 - 1 = 1/2 + log 2 - 1; derivative -1/2 + 1
    logprobs = torch.tensor([math.log(0.5)], dtype=torch.float64, requires_grad=True)
    kl = reference_kl(logprobs, torch.tensor([math.log(0.25)], dtype=torch.float64))
    kl.sum().backward()
    assert kl.item() == pytest.approx(math.log(2) - 0.5)
    assert logprobs.grad.item() == pytest.approx(0.5)


def test_weights_of_tokens_by_hand():
    lengths = torch.tensor([3, 1])
    assert token_weights(lengths, "token_mean").tolist() == pytest.approx([1 / 4, 1 / 4])
    assert token_weights(lengths, "sequence_mean").tolist() == pytest.approx([1 / 6, 1 / 2])


def test_a_sequence_without_tokens_counts_as_a_sequence():
    assert token_weights(torch.tensor([2, 0]), "sequence_mean")[0].item() == pytest.approx(1 / 4)


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="median"):
        token_weights(torch.tensor([1]), "median")


@pytest.mark.parametrize("case", TRL["cases"], ids=lambda c: f"{c['aggregation']}-kl{c['kl_ctl']}")
def test_loss_gradient_and_statistics_equal_trls(case):
    lengths = torch.tensor(TRL["lengths"])
    real = torch.arange(6)[None] < lengths[:, None]
    tensors = {name: torch.tensor(values) for name, values in TRL["inputs"].items()}
    logprobs = tensors["logprobs"].clone().requires_grad_()

    def per_token(values):
        return values[:, None].expand(4, 6)[real]

    terms = clipped_terms(
        logprobs[real],
        tensors["old_logprobs"][real],
        per_token(tensors["advantages"]),
        eps_clip=case["eps_clip"],
        eps_clip_higher=case["eps_clip_higher"],
    )
    kl = reference_kl(logprobs[real], tensors["ref_logprobs"][real])
    loss = ((terms.loss + case["kl_ctl"] * kl) * per_token(token_weights(lengths, case["aggregation"]))).sum()
    loss.backward()

    assert loss.item() == pytest.approx(case["loss"], rel=1e-5)
    torch.testing.assert_close(logprobs.grad, torch.tensor(case["gradient"]), rtol=1e-5, atol=1e-7)
    assert terms.clipped_low.float().mean().item() == pytest.approx(case["clipped_low"])
    assert terms.clipped_high.float().mean().item() == pytest.approx(case["clipped_high"])
    if case["kl"] is not None:
        assert kl.mean().item() == pytest.approx(case["kl"], rel=1e-5)


def test_trls_figures_meet_both_clips():
    assert all(case["clipped_low"] > 0 and case["clipped_high"] > 0 for case in TRL["cases"])


def test_advantages_equal_trls():
    rewards = torch.tensor(TRL["rewards"])
    expected = (rewards - rewards.mean(dim=1, keepdim=True)) / (torch.tensor(TRL["reward_std"])[:, None] + 1e-4)
    torch.testing.assert_close(group_advantages(rewards, std=True, eps=1e-4), expected)
