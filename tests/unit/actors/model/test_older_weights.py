"""Are older tokens of the version that their server says? They are asked of the weights of that version."""

import dataclasses
from statistics import median

import pytest
import torch

from actors.model.policy_model import PolicyModel
from launcher.config.schema import OptimizerConfig
from launcher.config.supervision import GateConfig
from tests.support.tiny_models import actor, make_groups, reference, train, weights

MOST = 2


def model_of(folder, **settings):
    config = actor(folder, **settings)
    return PolicyModel(config, reference(folder), temperature=1.0, total_steps=50, older_versions=MOST)


def answered(model, groups, *, server, claims=None):
    """`groups` as a server answers them that holds the model's weights now; `claims`: what it says they are."""
    version = model.policy_version if claims is None else claims

    def of(group, rollout):
        made = rollout.completion
        logprobs = tuple(model.logprobs(group.prompt.token_ids, made.token_ids))
        completion = dataclasses.replace(made, logprobs=logprobs, weight_version=version, server=server)
        return dataclasses.replace(rollout, completion=completion)

    return [dataclasses.replace(g, rollouts=tuple(of(g, one) for one in g.rollouts)) for g in groups]


def continued(older, newer, at):
    """Completions of which the first `at` tokens are of the older weights."""

    def of(first, second):
        a, b = first.completion, second.completion
        cut = min(at, len(a.token_ids))
        runs = ((a.weight_version, cut), (b.weight_version, len(a.token_ids) - cut))
        versions = runs if runs[1][1] else ()
        made = dataclasses.replace(a, logprobs=(*a.logprobs[:cut], *b.logprobs[cut:]), versions=versions)
        return dataclasses.replace(first, completion=made)

    pairs = zip(older, newer, strict=True)
    return [dataclasses.replace(g, rollouts=tuple(map(of, g.rollouts, later.rollouts))) for g, later in pairs]


def distance(model, groups):
    found = model.compute_gradients(groups)
    model.discard()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, {"use_lora": True, "lora_rank": 4}])
@pytest.mark.parametrize("minibatches", [1, 3])
def test_old_weights_under_a_newer_label_are_seen_and_true_older_ones_are_near(folder, lora, minibatches):
    model = model_of(folder, ppo_n_minibatches=minibatches, **lora)
    groups = [make_groups(seed=seed, groups=2) for seed in range(4)]
    first = answered(model, groups[0], server="stale", claims=2)
    train(model, range(2))
    true = answered(model, groups[1], server="true")
    train(model, [2])
    current = answered(model, groups[2], server="true")
    before = weights(model)
    stats = distance(model, [*first, *true, *current])
    found = stats.logprob_distance
    assert found.labelled.keys() == found.older.keys() == {("stale", 2), ("true", 2)}
    assert found.labelled["true", 2] < 1e-6 < 1e-4 < found.labelled["stale", 2]
    assert found.older["true", 2] > 1e-4, "to the weights of today a true one is far too"
    assert stats.metrics()["grpo_actor/logprob_distance/labelled"] == found.labelled["stale", 2]
    for name, weight in weights(model).items():
        assert torch.equal(weight, before[name]), name


@pytest.mark.slow
def test_each_token_is_asked_of_its_own_version(folder):
    model = model_of(folder)
    train(model, range(2))
    older = answered(model, make_groups(seed=7), server="one")
    train(model, [2])
    mixed = continued(older, answered(model, make_groups(seed=7), server="one"), 3)
    found = distance(model, mixed).logprob_distance
    assert found.labelled.keys() == {("one", 2), ("one", 3)}, "those that current weights continued are asked too"
    assert max(found.labelled.values()) < 1e-6
    swapped = continued(older, answered(model, make_groups(seed=7), server="one", claims=3), 0)
    assert distance(model, [*swapped, *older]).logprob_distance.labelled["one", 2] < 1e-6


@pytest.mark.slow
def test_what_is_not_kept_is_not_claimed_to_be_known(folder):
    model = model_of(folder)
    kept = [answered(model, make_groups(seed=version), server="one") for version in range(1)]
    train(model, range(MOST))
    assert distance(model, kept[0]).logprob_distance.labelled["one", 0] < 1e-6
    train(model, [5])
    found = distance(model, kept[0]).logprob_distance
    assert (found.labelled, set(found.older)) == ({}, {("one", 0)}), f"more than {MOST} behind"
    model.begin_anew()
    later = answered(model, make_groups(), server="one", claims=2)
    assert not distance(model, later).logprob_distance.labelled, "versions are counted anew"
    plain = PolicyModel(actor(folder), reference(folder), temperature=1.0, total_steps=9)
    assert not distance(train(plain, [0]), kept[0]).logprob_distance.labelled


@pytest.mark.slow
@pytest.mark.parametrize("steps", [30, pytest.param(250, marks=pytest.mark.long)])
@pytest.mark.parametrize("lr", [1e-5, 3e-4, 3e-3, 3e-2])
def test_no_healthy_step_is_refused_whatever_is_learned_how_fast(folder, lr, steps):
    """Tokens of the versions up to two before, with the limit of the gate; printed by `pytest -s`."""
    model = model_of(folder, optimizer=OptimizerConfig(lr=lr, warmup_steps=2, lr_scheduler_type="constant"))
    ahead, today, own = [], [], []
    for step in range(steps):
        made = answered(model, make_groups(seed=step, groups=2), server=f"server-{step % 2}")
        ahead = [*ahead, made][-MOST - 1 :]
        stats = model.compute_gradients([group for groups in ahead for group in groups])
        found = stats.logprob_distance
        assert found.labelled.keys() == found.older.keys()
        today += found.older.values()
        own += found.labelled.values()
        model.step_ahead()
        model.commit()
    print(f"lr {lr:g}, {steps} steps: older ones {median(today):.2g} (at most {max(today):.2g}) from the weights of ")
    print(f"today, {median(own):.2g} (at most {max(own):.2g}) from those of their own version")
    assert max(own) < GateConfig().distance_float32


@pytest.mark.slow
def test_with_one_step_the_decoupled_loss_is_that_of_the_clip_to_the_maker_without_its_clip(folder):
    """And the clip cuts something: a step after that of the same weights goes less far with it."""
    ways = {
        "clipped": {},
        "unclipped": {"eps_clip": 1.0, "eps_clip_higher": 1e6},
        "decoupled": {"use_decoupled_loss": True, "behave_imp_weight_cap": 1e6},
    }
    found = {}
    for name, settings in ways.items():
        model = model_of(folder, optimizer=OptimizerConfig(lr=3e-2, warmup_steps=0), **settings)
        older = answered(model, make_groups(seed=7), server="one")
        model.compute_gradients(answered(model, make_groups(seed=8), server="one"))
        model.commit()
        clipped = model.compute_gradients(older).metrics()
        grads = [one.grad.flatten() for one in model._part.parameters.values() if one.grad is not None]
        found[name] = torch.cat(grads), clipped["grpo_actor/clip_ratio/low"] + clipped["grpo_actor/clip_ratio/high"]
    gradient, cut = found["decoupled"]
    assert cut == 0 < found["clipped"][1]
    assert torch.allclose(gradient, found["unclipped"][0], rtol=0, atol=1e-5 * gradient.abs().max().item())
    assert (found["clipped"][0] - gradient).abs().max() > 1e-2 * gradient.abs().max()
