"""What must not move the weights does not, and settings act as they say: poison, discards, dtypes, bad settings."""

import dataclasses
import math

import pytest
import torch

from actors.model.policy_model import PolicyModel
from actors.training.step_loop import gradients_of
from launcher.base.errors import ConfigError, ModelError, ResourceError, TrainerError
from launcher.base.rollouts import RolloutBatch
from launcher.config.schema import OptimizerConfig
from tests.support.tiny_models import actor, make_groups, make_model, reference, weights
from tests.support.worlds.model import bits, close, gradients, policy


def with_reward(groups, reward):
    first, *others = groups[0].rollouts
    spoilt = dataclasses.replace(groups[0], rollouts=(dataclasses.replace(first, reward=reward), *others))
    return [spoilt, *groups[1:]]


def with_logprob(groups, group, value):
    first, *others = groups[group].rollouts
    completion = dataclasses.replace(first.completion, logprobs=(value, *first.completion.logprobs[1:]))
    rollouts = (dataclasses.replace(first, completion=completion), *others)
    return [dataclasses.replace(g, rollouts=rollouts) if i == group else g for i, g in enumerate(groups)]


def parts(model):
    """The policy and its reference."""
    return model._learner.model, model._learner.objective._reference.model


def with_nothing_said(groups):
    def silent(rollout):
        return dataclasses.replace(
            rollout, completion=dataclasses.replace(rollout.completion, token_ids=(), logprobs=())
        )

    return [dataclasses.replace(group, rollouts=tuple(map(silent, group.rollouts))) for group in groups]


POISON = {
    "NaN reward": lambda groups: with_reward(groups, math.nan),
    "infinite reward": lambda groups: with_reward(groups, math.inf),
    "no reward": lambda groups: with_reward(groups, None),
    "NaN log-prob": lambda groups: with_logprob(groups, 0, math.nan),
    "NaN log-prob where nothing is learned": lambda groups: with_logprob(groups, 1, math.nan),
    "a token that the server held impossible": lambda groups: with_logprob(groups, 0, -math.inf),
    "no tokens at all": with_nothing_said,
}


@pytest.mark.slow
@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("recompute", [False, True])
def test_poison_is_seen_can_not_be_committed_and_leaves_no_trace(folder, poison, recompute):
    spoilt, untouched = (policy(folder, recompute_logprob=recompute) for _ in range(2))
    for model in (spoilt, untouched):
        model.compute_gradients(make_groups())
        model.commit()
    before = bits(weights(spoilt))

    stats = spoilt.compute_gradients(POISON[poison](make_groups(seed=1)))
    assert not stats.finite
    assert stats.problems
    with pytest.raises(TrainerError, match=r"must not be committed: .* is (nan|inf)"):
        spoilt.commit()
    spoilt.discard()
    assert bits(weights(spoilt)) == before
    assert spoilt.policy_version == 1

    for model in (spoilt, untouched):  # the optimizer has not kept anything of it either
        model.compute_gradients(make_groups(seed=2))
        model.commit()
    assert bits(weights(spoilt)) == bits(weights(untouched))


@pytest.mark.slow
def test_discarded_gradients_are_gone(folder):
    model = policy(folder)
    before = bits(weights(model))
    model.compute_gradients(make_groups())
    model.discard()
    with pytest.raises(TrainerError, match="no gradients to commit"):
        model.commit()
    assert bits(weights(model)) == before


@pytest.mark.slow
def test_gradients_do_not_add_up_over_batches(folder):
    model = policy(folder)
    model.compute_gradients(make_groups(seed=1))
    model.compute_gradients(make_groups(seed=0))
    again = gradients(model)
    model.discard()
    model.compute_gradients(make_groups(seed=0))
    assert bits(again) == bits(gradients(model))


@pytest.mark.slow
def test_a_group_that_is_only_compared_changes_no_bit_of_the_gradients(folder):
    model, groups = policy(folder), make_groups(seed=1)
    made = {"failed": 0, "retried": 0, "generated_tokens": 1, "seconds": 1.0}
    alone = gradients_of(model, RolloutBatch(groups=tuple(groups), **made))
    before = gradients(model)
    flat = make_groups(seed=2)[1]
    elsewhere = [dataclasses.replace(one.completion, server="http://other") for one in flat.rollouts]
    rollouts = [dataclasses.replace(one, completion=made) for one, made in zip(flat.rollouts, elsewhere, strict=True)]
    left_out = dataclasses.replace(flat, rollouts=tuple(rollouts))
    stats = gradients_of(model, RolloutBatch(groups=tuple(groups), filtered=(left_out,), **made))
    assert bits(gradients(model)) == bits(before)
    assert dataclasses.replace(stats, logprob_distance=alone.logprob_distance) == alone
    here = groups[0].rollouts[0].completion.server
    far = stats.logprob_distance.by_server
    assert far[here] == alone.logprob_distance.mean
    assert far["http://other"] > 0


@pytest.mark.slow
def test_a_batch_of_equal_rewards_moves_nothing_despite_momentum_and_decay(folder):
    model = policy(folder)
    model.compute_gradients(make_groups())
    model.commit()
    before = bits(weights(model))
    stats = model.compute_gradients(make_groups(rewards=[[0.0] * 4] * 3))
    assert (stats.finite, stats.n_learning, stats.grad_norm) == (True, 0, 0.0)
    model.commit()
    assert model.policy_version == 2
    assert bits(weights(model)) == before


def test_weights_that_are_not_finite_are_seen(folder):
    model = policy(folder)
    assert model.weights_are_finite()
    first = next(model._learner.model.parameters())
    with torch.no_grad():
        first[0, :2] = 3e38  # each is a number, their sum is not
    assert model.weights_are_finite()
    with torch.no_grad():
        first[0, 0] = math.inf
    assert not model.weights_are_finite()


@pytest.mark.slow
def test_gradient_checkpointing_agrees_runs_layers_twice_and_leaves_dropout_off(tmp_path):
    folder = make_model(tmp_path / "model", attention_dropout=0.5)
    plain, sparing = policy(folder), policy(folder, gradient_checkpointing=True)
    runs = {id(plain): 0, id(sparing): 0}
    for model in (plain, sparing):

        def count(*_, model=model):
            runs[id(model)] += 1

        model._learner.model.model.layers[0].mlp.register_forward_pre_hook(count)
        model.compute_gradients(make_groups())
    assert (runs[id(plain)], runs[id(sparing)]) == (2, 3)  # two micro-batches, one of which learns
    close(gradients(sparing), gradients(plain), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_bfloat16_stays_near_float32_over_float32_weights(folder, ref_folder):
    exact = policy(folder, ref_folder, kl_loss_coef=0.1)
    rounded = policy(folder, ref_folder, kl_loss_coef=0.1, dtype="bfloat16")
    groups = make_groups()
    expected, stats = exact.compute_gradients(groups), rounded.compute_gradients(groups)
    assert stats.loss != expected.loss
    assert stats.loss == pytest.approx(expected.loss, rel=0.1)
    assert stats.entropy == pytest.approx(expected.entropy, rel=0.02)
    ours, theirs = gradients(rounded), gradients(exact)
    assert all(gradient.dtype == torch.float32 for gradient in ours.values())
    flat = [torch.cat([gradient.flatten() for gradient in found.values()]) for found in (ours, theirs)]
    assert torch.cosine_similarity(*flat, dim=0) > 0.98
    rounded.commit()
    assert rounded.weights_are_finite()


@pytest.mark.slow
def test_bfloat16_with_checkpointed_layers_agrees_with_itself(folder):
    plain, sparing = (policy(folder, dtype="bfloat16", gradient_checkpointing=flag) for flag in (False, True))
    for model in (plain, sparing):
        model.compute_gradients(make_groups())
    close(gradients(sparing), gradients(plain), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_an_update_smaller_than_bfloat16_can_hold_is_not_lost(folder):
    model = policy(folder, dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-6, weight_decay=0.0))
    before = weights(model)
    model.compute_gradients(make_groups())
    model.commit()
    after = weights(model)
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_published_weights_have_the_servers_dtype_and_their_place(folder):
    model = policy(folder)
    published, exact = dict(model.named_weights(torch.bfloat16)), dict(model.named_weights(torch.float32))
    assert published.keys() == exact.keys() == weights(model).keys()
    for name, weight in published.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, exact[name].bfloat16())


def test_the_tokenizer_is_the_models(folder):
    model = policy(folder)
    assert model.tokenizer.decode(model.tokenizer("1+2=3").input_ids) == "1+2=3"
    assert model.folder == folder


def test_threads_are_set(folder):
    before = torch.get_num_threads()
    try:
        policy(folder, threads=before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"dtype": "float16"}, ConfigError, "dtype 'float16'"),
        ({"path": "/no/such/model"}, ModelError, r"(?s)/no/such/model.*actor\.path"),
    ],
)
def test_bad_settings_are_named(folder, settings, error, message):
    with pytest.raises(error, match=message):
        PolicyModel(actor(folder, **settings), reference(folder), temperature=1.0, total_steps=1)


def test_a_missing_reference_names_its_setting(folder):
    with pytest.raises(ModelError, match=r"(?s)/no/such/model.*ref\.path"):
        policy(folder, "/no/such/model", kl_loss_coef=0.1)


@pytest.mark.slow
def test_a_reference_is_loaded_only_for_a_kl(folder):
    assert policy(folder, "/no/such/model").compute_gradients(make_groups()).kl_ref is None


def test_greedy_samples_can_not_be_trained_on(folder):
    with pytest.raises(ConfigError, match=r"gconfig\.temperature is 0"):
        policy(folder, temperature=0.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_missed(folder):
    with pytest.raises(ResourceError, match=r"actor\.device=cuda"):
        policy(folder, device="cuda")


def test_groups_of_unequal_size_are_refused(folder):
    groups = make_groups()
    short = dataclasses.replace(groups[0], rollouts=groups[0].rollouts[:2])
    with pytest.raises(TrainerError, match=r"groups of one size, not of \[2, 4\]"):
        policy(folder).compute_gradients([short, *groups[1:]])


@pytest.mark.slow
def test_metrics_are_finite_numbers_under_their_wandb_keys(folder, ref_folder):
    metrics = policy(folder, ref_folder, kl_loss_coef=0.1).compute_gradients(make_groups()).metrics()
    assert {"grpo_actor/loss", "grpo_actor/grad_norm", "grpo_actor/update_successful"} <= metrics.keys()
    assert "grpo_actor/kl_ref/avg" in metrics
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())


def test_what_is_copied_over_the_models_files_does_not_reach_the_weights(tmp_path):
    folder, other = make_model(tmp_path / "mine"), make_model(tmp_path / "other", seed=1)
    model = policy(folder, folder, kl_loss_coef=0.1)
    named = [(part, name, weight) for part in (0, 1) for name, weight in parts(model)[part].named_parameters()]
    held = {f"{part} {name}": weight.detach() for part, name, weight in named}
    before = bits(held)
    with (folder / "model.safetensors").open("r+b") as file:  # as `cp` does it: the file stays, and its content is new
        file.write((other / "model.safetensors").read_bytes())
    assert bits(held) == before
