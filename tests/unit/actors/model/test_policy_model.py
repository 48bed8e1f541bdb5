"""The whole update against plain autograd, what may be committed, and that variants of one computation agree."""

import dataclasses
import math
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from launcher.base.errors import ConfigError, TrainerError
from launcher.checkpoints.model_shape import MODEL_TYPES
from launcher.config.recipe import RewardNormConfig
from launcher.config.schema import MicroBatchConfig, OptimizerConfig
from tests.support.tiny_models import make_groups, make_model, weights
from tests.support.worlds.model import TEMPERATURE, close, gradients, policy


def naive_logprobs(model, prompt, completion, temperature):
    """One sequence, all logits at once, no batch and no padding."""
    logits = model(torch.tensor([[*prompt, *completion]])).logits[0] / temperature
    predicting = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return predicting[torch.arange(len(completion)), torch.tensor(completion)]


def naive_gradients(folder, ref_folder, groups, config, temperature):
    """The objective as one reads it in the paper, sequence by sequence: gradients, loss, norm, distances."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ref = AutoModelForCausalLM.from_pretrained(ref_folder, dtype=torch.float32)
    n_tokens = sum(len(r.completion.token_ids) for g in groups for r in g.rollouts)
    n_sequences = sum(len(g.rollouts) for g in groups)
    loss, distances = torch.zeros(()), []
    for group in groups:
        rewards = torch.tensor([r.reward for r in group.rollouts])
        advantages = rewards - rewards.mean()
        if config.reward_norm.std_level:
            advantages = advantages / (rewards.std() + config.reward_norm.eps)
        for rollout, advantage in zip(group.rollouts, advantages, strict=True):
            tokens = rollout.completion.token_ids
            logprobs = naive_logprobs(model, group.prompt.token_ids, tokens, temperature)
            old = torch.tensor(rollout.completion.logprobs)
            distances.append((logprobs.detach() - old).abs())
            ratio = torch.exp(logprobs - (logprobs.detach() if config.recompute_logprob else old))
            clipped = ratio.clamp(1 - config.eps_clip, 1 + config.eps_clip_higher)
            per_token = -torch.minimum(ratio * advantage, clipped * advantage)
            difference = naive_logprobs(ref, group.prompt.token_ids, tokens, temperature).detach() - logprobs
            per_token = per_token + config.kl_loss_coef * (difference.exp() - difference - 1)
            if config.loss_aggregation == "token_mean":
                loss = loss + per_token.sum() / n_tokens
            else:
                loss = loss + per_token.mean() / n_sequences
    loss.backward()
    parameters = list(model.parameters())
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.optimizer.gradient_clipping)
    grads = {name: p.grad for name, p in model.named_parameters()}
    return grads, loss.item(), norm.item(), torch.cat(distances)


VARIANTS = {
    "token mean": {},
    "sequence mean": {"loss_aggregation": "sequence_mean"},
    "without the deviation": {"reward_norm": RewardNormConfig(std_level=None)},
    "KL to a reference": {"kl_loss_coef": 0.3},
    "old log-probs from the trainer": {"recompute_logprob": True},
    "no clipping of the gradient": {"optimizer": OptimizerConfig(gradient_clipping=1e9)},
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
def test_the_whole_update_equals_plain_autograd(folder, ref_folder, variant, temperature):
    model = policy(folder, ref_folder, temperature=temperature, **VARIANTS[variant])
    groups = make_groups()
    stats = model.compute_gradients(groups)
    expected, loss, norm, distances = naive_gradients(folder, ref_folder, groups, model._actor, temperature)
    close(gradients(model), expected, rtol=1e-4, atol=1e-6)
    assert stats.loss == pytest.approx(loss, rel=1e-4)
    assert stats.grad_norm == pytest.approx(norm, rel=1e-4)
    assert stats.logprob_distance.mean == pytest.approx(distances.mean().item(), rel=1e-4)
    assert stats.logprob_distance.max == pytest.approx(distances.max().item(), rel=1e-4)
    assert stats.n_tokens == len(distances)
    assert stats.finite


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_each_architecture_equals_plain_autograd(tmp_path, kind):
    folder = make_model(tmp_path / "model", kind)
    model = policy(folder)
    groups = make_groups()
    model.compute_gradients(groups)
    expected, *_ = naive_gradients(folder, folder, groups, model._actor, TEMPERATURE)
    close(gradients(model), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_ratio_meets_both_clips_in_these_rollouts(folder):
    stats = policy(folder).compute_gradients(make_groups())
    assert stats.clip_fraction_low > 0.02
    assert stats.clip_fraction_high > 0.02
    assert stats.approx_kl > 0


@pytest.mark.slow
def test_the_entropy_of_a_uniform_model_is_the_logarithm_of_its_vocabulary(tmp_path):
    uniform = make_model(tmp_path / "model", initializer_range=1e-9)
    assert policy(uniform).compute_gradients(make_groups()).entropy == pytest.approx(math.log(32), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_micro_batches_do_not_change_the_result(folder, ref_folder, aggregation):
    whole = policy(folder, ref_folder, loss_aggregation=aggregation, kl_loss_coef=0.1)
    small = policy(folder, ref_folder, loss_aggregation=aggregation, kl_loss_coef=0.1, mb_spec=MicroBatchConfig(16))
    groups = make_groups()
    expected, stats = whole.compute_gradients(groups), small.compute_gradients(groups)
    assert expected.n_micro_batches == 1
    assert stats.n_micro_batches > 5
    close(gradients(small), gradients(whole), rtol=1e-4, atol=1e-6)
    for field in dataclasses.fields(stats):
        if isinstance(value := getattr(expected, field.name), float) and field.name != "padding_ratio":
            assert getattr(stats, field.name) == pytest.approx(value, rel=1e-4), field.name


def from_servers(groups):
    """In turn from two servers, one of which says log-probs that are 20 nats off."""
    moved = []
    for group in groups:
        rollouts = []
        for index, rollout in enumerate(group.rollouts):
            name = ("near", "far")[index % 2]
            off = 20.0 * (name == "far")
            logprobs = tuple(value - off for value in rollout.completion.logprobs)
            completion = dataclasses.replace(rollout.completion, server=name, logprobs=logprobs)
            rollouts.append(dataclasses.replace(rollout, completion=completion))
        moved.append(dataclasses.replace(group, rollouts=tuple(rollouts)))
    return moved


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [10_000, 16])
def test_the_distance_is_known_of_each_server_alone(folder, tokens):
    model = policy(folder, mb_spec=MicroBatchConfig(max_tokens_per_mb=tokens))
    groups = from_servers(make_groups())
    assert model.largest_micro_batch == 0
    stats = model.compute_gradients(groups)
    assert (0 < model.largest_micro_batch <= 16) == (tokens == 16)
    by_server = stats.logprob_distance.by_server
    assert set(by_server) == {"near", "far"}
    counts = Counter[str]()
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        counts[rollout.completion.server] += len(rollout.completion.token_ids)
    mean = sum(by_server[name] * count for name, count in counts.items()) / counts.total()
    assert mean == pytest.approx(stats.logprob_distance.mean)
    assert by_server["far"] > by_server["near"] + 1
    assert not policy(folder).compute_gradients(make_groups()).logprob_distance.by_server


@pytest.mark.slow
def test_sequences_without_an_advantage_get_no_backward_pass_and_still_count(folder):
    model = policy(folder)
    stats = model.compute_gradients(make_groups())
    assert (stats.n_learning, stats.n_micro_batches) == (8, 2)
    with_kl = policy(folder, kl_loss_coef=0.1).compute_gradients(make_groups())
    assert (with_kl.n_learning, with_kl.n_micro_batches) == (12, 1)


def test_a_sequence_longer_than_a_micro_batch_leaves_no_gradient(folder):
    model = policy(folder, mb_spec=MicroBatchConfig(5))
    with pytest.raises(ConfigError, match=r"actor\.mb_spec\.max_tokens_per_mb"):
        model.compute_gradients(make_groups())
    with pytest.raises(TrainerError, match="no gradients to commit"):
        model.commit()


@pytest.mark.slow
def test_a_commit_is_one_step_of_adamw_at_the_scheduled_rate(folder):
    model = policy(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    named = dict(plain.named_parameters())
    decayed = [p for p in named.values() if p.ndim > 1]
    spared = [p for p in named.values() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}])
    for step, rate in enumerate([5e-3, 1e-2, 1e-2]):  # two steps of warm-up to 1e-2
        stats = model.compute_gradients(make_groups(seed=step))
        assert stats.learning_rate == pytest.approx(rate)
        for name, gradient in gradients(model).items():
            named[name].grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        model.commit()
        assert model.policy_version == step + 1
        assert all(parameter.grad is None for parameter in model._learner.model.parameters())
    ours = weights(model)
    close(ours, {name: named[name].detach() for name in ours})


@pytest.mark.slow
def test_training_raises_the_probability_of_what_was_rewarded(folder):
    model = policy(folder, recompute_logprob=True, optimizer=OptimizerConfig(lr=1e-2))
    (group,) = make_groups(groups=1, rewards=[[1.0, 0.0, 0.0, 0.0]])
    good = group.rollouts[0].completion.token_ids

    def logprob():
        return naive_logprobs(model._learner.model, group.prompt.token_ids, good, TEMPERATURE).sum().item()

    before = logprob()
    for _ in range(5):
        model.compute_gradients([group])
        model.commit()
    assert logprob() > before + 1
