"""The formulas against values worked by hand, and against the figures of trl's own loss on the same tensors."""

import json
import math
from pathlib import Path

import pytest
import torch

from actors.model.grpo import cispo_terms, clipped_terms, reference_kl, sequence_mean_of, token_weights

TRL = json.loads((Path(__file__).parent / "data" / "trl_figures.json").read_text())


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
    terms = clipped_terms(logprobs - old, torch.tensor([advantage]).double(), eps_clip=0.2, eps_clip_higher=0.3)
    terms.loss.sum().backward()
    assert terms.loss.item() == pytest.approx(loss)
    assert logprobs.grad.item() == pytest.approx(gradient)  # d loss / d logprob = -A · r, or 0 where clipped
    assert (terms.clipped_low.item(), terms.clipped_high.item()) == (clipped == "low", clipped == "high")
    assert terms.ratio.item() == pytest.approx(ratio)
    assert terms.approx_kl.item() == pytest.approx(ratio - 1 - math.log(ratio))


def test_without_a_higher_clip_it_is_symmetrical():
    terms = clipped_terms(torch.tensor([1.0]), torch.tensor([1.0]), eps_clip=0.2, eps_clip_higher=None)
    assert terms.loss.item() == pytest.approx(-1.2)


def test_reference_kl_by_hand():
    # policy 1/2, reference 1/4: exp(log 1/2) - log 1/2 - 1 = 1/2 + log 2 - 1; derivative -1/2 + 1
    logprobs = torch.tensor([math.log(0.5)], dtype=torch.float64, requires_grad=True)
    kl = reference_kl(logprobs, torch.tensor([math.log(0.25)], dtype=torch.float64), "k3")
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
        logprobs[real] - tensors["old_logprobs"][real],
        per_token(tensors["advantages"]),
        eps_clip=case["eps_clip"],
        eps_clip_higher=case["eps_clip_higher"],
    )
    kl = reference_kl(logprobs[real], tensors["ref_logprobs"][real], "k3")
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


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (5.0, -2.0, 6.0, 0.0),  # 3 · 2: the ratio counts as 3
        (2.5, -2.0, 5.0, 5.0),  # below c_clip
        (5.0, 2.0, -2.6, 0.0),  # a good token knows the upper clip only
    ],
)
def test_the_dual_clip_by_hand(ratio, advantage, loss, gradient):
    log_ratio = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    terms = clipped_terms(log_ratio, advantages, eps_clip=0.2, eps_clip_higher=0.3, c_clip=3.0)
    terms.loss.sum().backward()
    assert terms.loss.item() == pytest.approx(loss)
    assert log_ratio.grad.item() == pytest.approx(gradient)
    assert terms.clipped_high.item() == (gradient == 0)


@pytest.mark.parametrize(("ratio", "counts"), [(0.5, 0.8), (1.1, 1.1), (4.0, 1.3)])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_with_cispo_a_clipped_token_keeps_its_gradient(ratio, counts, advantage):
    old = torch.tensor([-2.0], dtype=torch.float64)
    logprobs = (old + math.log(ratio)).requires_grad_()
    terms = cispo_terms(logprobs, logprobs - old, torch.tensor([advantage]).double(), eps_clip=0.2, eps_clip_higher=0.3)
    terms.loss.sum().backward()
    assert logprobs.grad.item() == pytest.approx(-counts * advantage)
    assert (terms.clipped_low.item(), terms.clipped_high.item()) == (ratio == 0.5, ratio == 4.0)


def test_the_ratio_of_a_sequence_is_the_geometric_mean_of_its_tokens():
    ratios = torch.tensor([2.0, 8.0, 3.0])
    mean = sequence_mean_of(ratios.log(), torch.tensor([0, 0, 2]), n=3).exp()
    torch.testing.assert_close(mean, torch.tensor([4.0, 4.0, 3.0]))


def test_the_estimators_of_a_kl_by_hand():
    logprobs, ref = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert reference_kl(logprobs, ref, "k1").item() == pytest.approx(math.log(2))
    assert reference_kl(logprobs, ref, "k2").item() == pytest.approx(math.log(2) ** 2 / 2)
    with pytest.raises(ValueError, match="k4"):
        reference_kl(logprobs, ref, "k4")


def test_of_a_constant_length_each_token_weighs_the_same_whatever_the_batch_is_made_of():
    assert token_weights(torch.tensor([3, 1]), "constant_length", constant=10).tolist() == pytest.approx([0.05, 0.05])
