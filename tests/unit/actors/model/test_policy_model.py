"""The whole update against plain autograd, what may be committed, and that variants of one computation agree."""

import dataclasses
import math
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.model.policy_model import PolicyModel
from launcher.base.errors import ConfigError, ModelError, ResourceError, TrainerError
from launcher.config.schema import AdvNormConfig, MicroBatchConfig, OptimizerConfig
from tests.support.tiny_models import actor, make_groups, make_model, reference

TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(scope="module")
def ref_folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("reference") / "model", seed=1)


def policy(folder, ref_folder=None, *, temperature=TEMPERATURE, **settings):
    return PolicyModel(
        actor(folder, **settings), reference(ref_folder or folder), temperature=temperature, total_steps=10
    )


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model._part.model.named_parameters()}


def weights(model):
    return {name: weight.clone() for name, weight in model.named_weights(torch.float32)}


def bits(tensors):
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def close(ours, expected, **tolerance):
    assert ours.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(ours[name], expected[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)


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
        if config.adv_norm.std:
            advantages = advantages / (rewards.std() + config.adv_norm.eps)
        for rollout, advantage in zip(group.rollouts, advantages, strict=True):
            tokens = rollout.completion.token_ids
            logprobs = naive_logprobs(model, group.prompt.token_ids, tokens, temperature)
            old = torch.tensor(rollout.completion.logprobs)
            distances.append((logprobs.detach() - old).abs())
            ratio = torch.exp(logprobs - (logprobs.detach() if config.recompute_logprob else old))
            clipped = ratio.clamp(1 - config.eps_clip, 1 + config.eps_clip_higher)
            per_token = -torch.minimum(ratio * advantage, clipped * advantage)
            difference = naive_logprobs(ref, group.prompt.token_ids, tokens, temperature).detach() - logprobs
            per_token = per_token + config.kl_ctl * (difference.exp() - difference - 1)
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
    "without the deviation": {"adv_norm": AdvNormConfig(std=False)},
    "KL to a reference": {"kl_ctl": 0.3},
    "old log-probs from the trainer": {"recompute_logprob": True},
    "no clipping of the gradient": {"optimizer": OptimizerConfig(gradient_clipping=1e9)},
}


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


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_each_architecture_equals_plain_autograd(tmp_path, kind):
    folder = make_model(tmp_path / "model", kind)
    model = policy(folder)
    groups = make_groups()
    model.compute_gradients(groups)
    expected, *_ = naive_gradients(folder, folder, groups, model._actor, TEMPERATURE)
    close(gradients(model), expected, rtol=1e-4, atol=1e-6)


def test_the_ratio_meets_both_clips_in_these_rollouts(folder):
    stats = policy(folder).compute_gradients(make_groups())
    assert stats.clip_fraction_low > 0.02
    assert stats.clip_fraction_high > 0.02
    assert stats.approx_kl > 0


def test_the_entropy_of_a_uniform_model_is_the_logarithm_of_its_vocabulary(tmp_path):
    uniform = make_model(tmp_path / "model", initializer_range=1e-9)
    assert policy(uniform).compute_gradients(make_groups()).entropy == pytest.approx(math.log(32), rel=1e-5)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_micro_batches_do_not_change_the_result(folder, ref_folder, aggregation):
    whole = policy(folder, ref_folder, loss_aggregation=aggregation, kl_ctl=0.1)
    small = policy(folder, ref_folder, loss_aggregation=aggregation, kl_ctl=0.1, mb_spec=MicroBatchConfig(16))
    groups = make_groups()
    expected, stats = whole.compute_gradients(groups), small.compute_gradients(groups)
    assert expected.n_micro_batches == 1
    assert stats.n_micro_batches > 5
    close(gradients(small), gradients(whole), rtol=1e-4, atol=1e-6)
    for field in dataclasses.fields(stats):
        if isinstance(value := getattr(expected, field.name), float):
            assert getattr(stats, field.name) == pytest.approx(value, rel=1e-4), field.name


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


def test_sequences_without_an_advantage_get_no_backward_pass_and_still_count(folder):
    model = policy(folder)
    stats = model.compute_gradients(make_groups())
    assert (stats.n_sequences, stats.n_learning, stats.n_micro_batches) == (12, 8, 2)
    with_kl = policy(folder, kl_ctl=0.1).compute_gradients(make_groups())
    assert (with_kl.n_learning, with_kl.n_micro_batches) == (12, 1)


def test_a_sequence_longer_than_a_micro_batch_leaves_no_gradient(folder):
    model = policy(folder, mb_spec=MicroBatchConfig(5))
    with pytest.raises(ConfigError, match=r"actor\.mb_spec\.max_tokens_per_mb"):
        model.compute_gradients(make_groups())
    with pytest.raises(TrainerError, match="no gradients to commit"):
        model.commit()


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
        assert all(parameter.grad is None for parameter in model._part.model.parameters())
    ours = weights(model)
    close(ours, {name: named[name].detach() for name in ours})


def test_training_raises_the_probability_of_what_was_rewarded(folder):
    model = policy(folder, recompute_logprob=True, optimizer=OptimizerConfig(lr=1e-2))
    (group,) = make_groups(groups=1, rewards=[[1.0, 0.0, 0.0, 0.0]])
    good = group.rollouts[0].completion.token_ids

    def logprob():
        return naive_logprobs(model._part.model, group.prompt.token_ids, good, TEMPERATURE).sum().item()

    before = logprob()
    for _ in range(5):
        model.compute_gradients([group])
        model.commit()
    assert logprob() > before + 1


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


def with_reward(groups, reward):
    first, *others = groups[0].rollouts
    spoilt = dataclasses.replace(groups[0], rollouts=(dataclasses.replace(first, reward=reward), *others))
    return [spoilt, *groups[1:]]


def with_logprob(groups, group, value):
    first, *others = groups[group].rollouts
    completion = dataclasses.replace(first.completion, logprobs=(value, *first.completion.logprobs[1:]))
    rollouts = (dataclasses.replace(first, completion=completion), *others)
    return [dataclasses.replace(g, rollouts=rollouts) if i == group else g for i, g in enumerate(groups)]


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


def test_discarded_gradients_are_gone(folder):
    model = policy(folder)
    before = bits(weights(model))
    model.compute_gradients(make_groups())
    model.discard()
    with pytest.raises(TrainerError, match="no gradients to commit"):
        model.commit()
    assert bits(weights(model)) == before


def test_gradients_do_not_add_up_over_batches(folder):
    model = policy(folder)
    model.compute_gradients(make_groups(seed=1))
    model.compute_gradients(make_groups(seed=0))
    again = gradients(model)
    model.discard()
    model.compute_gradients(make_groups(seed=0))
    assert bits(again) == bits(gradients(model))


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
    with torch.no_grad():
        next(model._part.model.parameters())[0, 0] = math.inf
    assert not model.weights_are_finite()


def test_gradient_checkpointing_agrees_runs_layers_twice_and_leaves_dropout_off(tmp_path):
    folder = make_model(tmp_path / "model", attention_dropout=0.5)
    plain, sparing = policy(folder), policy(folder, gradient_checkpointing=True)
    runs = {id(plain): 0, id(sparing): 0}
    for model in (plain, sparing):

        def count(*_, model=model):
            runs[id(model)] += 1

        model._part.model.model.layers[0].mlp.register_forward_pre_hook(count)
        model.compute_gradients(make_groups())
    assert (runs[id(plain)], runs[id(sparing)]) == (2, 3)  # two micro-batches, one of which learns
    close(gradients(sparing), gradients(plain), rtol=1e-5, atol=1e-7)


def test_bfloat16_stays_near_float32_over_float32_weights(folder, ref_folder):
    exact = policy(folder, ref_folder, kl_ctl=0.1)
    rounded = policy(folder, ref_folder, kl_ctl=0.1, dtype="bfloat16")
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


def test_bfloat16_with_checkpointed_layers_agrees_with_itself(folder):
    plain, sparing = (policy(folder, dtype="bfloat16", gradient_checkpointing=flag) for flag in (False, True))
    for model in (plain, sparing):
        model.compute_gradients(make_groups())
    close(gradients(sparing), gradients(plain), rtol=1e-5, atol=1e-7)


def test_an_update_smaller_than_bfloat16_can_hold_is_not_lost(folder):
    model = policy(folder, dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-6, weight_decay=0.0))
    before = weights(model)
    model.compute_gradients(make_groups())
    model.commit()
    after = weights(model)
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_published_weights_have_the_servers_dtype_and_their_place(folder):
    model = policy(folder)
    for name, weight in model.named_weights(torch.bfloat16):
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, dict(model.named_weights(torch.float32))[name].bfloat16())


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
        policy(folder, "/no/such/model", kl_ctl=0.1)


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


def test_metrics_are_finite_numbers_under_their_wandb_keys(folder, ref_folder):
    metrics = policy(folder, ref_folder, kl_ctl=0.1).compute_gradients(make_groups()).metrics()
    assert {"grpo_actor/loss", "grpo_actor/grad_norm", "grpo_actor/update_successful"} <= metrics.keys()
    assert "grpo_actor/kl_ref/avg" in metrics
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())
