"""Each recipe through the whole update, against plain autograd over one sequence after another."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from launcher.config.recipe import AdvNormConfig, RewardNormConfig
from launcher.config.schema import MicroBatchConfig
from tests.support import tiny_models
from tests.support.tiny_models import make_groups, state_of

TRUNCATED = (0, 5, 9)
LONGEST = 9
RECIPES = {
    "GSPO": {"importance_sampling_level": "sequence", "loss_aggregation": "sequence_mean", "eps_clip": 0.05},
    "GSPO with a KL off the reward": {
        "importance_sampling_level": "sequence",
        "loss_aggregation": "sequence_mean",
        "kl_ctl": 0.05,
    },
    "CISPO": {"policy_loss": "cispo", "eps_clip": 1.0, "eps_clip_higher": 0.5},
    "Dr. GRPO": {"loss_aggregation": "constant_length", "reward_norm": RewardNormConfig(std_level=None)},
    "dual clip": {"c_clip": 1.6},
    "truncated ones left out": {"mask_truncated_completions": True},
    "overlong penalty": {"overlong_reward_penalty": True, "overlong_tokens": 5, "overlong_penalty_factor": 0.7},
    "entropy": {"entropy_coeff": 0.3, "loss_aggregation": "sequence_mean"},
    "KL off the reward": {"kl_ctl": 0.2, "kl_estimator": "k3"},
    "KL off the reward of log-probs from the trainer": {"kl_ctl": 0.2, "recompute_logprob": True},
    "decoupled, truncated": {"use_decoupled_loss": True, "behave_imp_weight_cap": 1.1},
    "decoupled, masked, KL off the reward": {
        "use_decoupled_loss": True,
        "behave_imp_weight_cap": 1.1,
        "behave_imp_weight_mode": "token_mask",
        "kl_ctl": 0.2,
    },
    "KL in the loss, k2": {"kl_loss_coef": 0.2, "kl_loss_type": "k2"},
    "advantages over the batch": {
        "adv_norm": AdvNormConfig(mean_level="batch", std_level="batch"),
        "mask_truncated_completions": True,
    },
}


@pytest.fixture
def folders(folder, ref_folder):
    return folder, ref_folder


def kl_of(policy, ref, estimator):
    difference = policy - ref
    return {"k1": difference, "k2": difference**2 / 2, "k3": torch.exp(-difference) - 1 + difference}[estimator]


def naive(folders, groups, config):
    """Gradients and loss, as the papers say it: a loop over sequences, then one over tokens where they differ."""
    policy, ref = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders)

    def distribution(model, prompt, tokens):
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0]
        return logits[len(prompt) - 1 : -1].log_softmax(-1)

    made = []
    for group in groups:
        rewards = torch.tensor([r.reward for r in group.rollouts])
        lengths = torch.tensor([float(len(r.completion.token_ids)) for r in group.rollouts])
        if config.overlong_reward_penalty:
            over = (lengths - (LONGEST - config.overlong_tokens)).clamp(min=0)
            rewards = rewards - over / config.overlong_tokens * config.overlong_penalty_factor
        advantages = rewards - rewards.mean()
        if config.reward_norm.std_level:
            advantages = advantages / (rewards.std() + config.reward_norm.eps)
        for rollout, advantage in zip(group.rollouts, advantages, strict=True):
            tokens = rollout.completion.token_ids
            full = distribution(policy, group.prompt.token_ids, tokens)
            logprobs = full[torch.arange(len(tokens)), torch.tensor(tokens)]
            made_by = torch.tensor(rollout.completion.logprobs)
            old = logprobs.detach() if config.recompute_logprob or config.use_decoupled_loss else made_by
            ref_logprobs = distribution(ref, group.prompt.token_ids, tokens).detach()
            ref_logprobs = ref_logprobs[torch.arange(len(tokens)), torch.tensor(tokens)]
            taken = [
                config.kl_ctl
                * kl_of(made_by if config.use_decoupled_loss else old, ref_logprobs, config.kl_estimator)[t:].sum()
                for t in range(len(tokens))
            ]
            by_token = advantage - torch.stack(taken)
            is_in = not (config.mask_truncated_completions and rollout.completion.finish_reason == "length")
            weight = (old - made_by).exp() if config.use_decoupled_loss else torch.ones(len(tokens))
            beyond = 0.0 if config.behave_imp_weight_mode == "token_mask" else config.behave_imp_weight_cap
            weight = torch.where(weight > config.behave_imp_weight_cap, beyond, weight)
            made.append((logprobs, old, ref_logprobs, by_token, -(full.exp() * full).sum(-1), is_in, weight))
    if config.adv_norm.std_level:
        counted = torch.cat([one[3] for one in made if one[5]])
        made = [(*one[:3], (one[3] - counted.mean()) / (counted.std() + config.adv_norm.eps), *one[4:]) for one in made]
    loss, n_tokens = torch.zeros(()), sum(len(one[0]) for one in made if one[5])
    for logprobs, old, ref_logprobs, by_token, entropy, is_in, weight in made:
        log_ratio, advantages = logprobs - old, by_token
        if config.importance_sampling_level == "sequence":
            log_ratio, advantages = log_ratio.mean().expand_as(log_ratio), advantages.mean().expand_as(advantages)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - config.eps_clip, 1 + config.eps_clip_higher)
        objective = torch.minimum(ratio * advantages, clipped * advantages)
        if config.policy_loss == "cispo":
            objective = clipped.detach() * advantages * logprobs
        if config.c_clip:
            objective = torch.where(advantages < 0, torch.maximum(objective, config.c_clip * advantages), objective)
        per_token = config.kl_loss_coef * kl_of(logprobs, ref_logprobs, config.kl_loss_type) - weight * objective
        per_token = per_token - config.entropy_coeff * entropy
        share = {
            "token_mean": 1 / n_tokens,
            "sequence_mean": 1 / (len(made) * len(logprobs)),
            "constant_length": 1 / (len(made) * LONGEST),
        }[config.loss_aggregation]
        loss = loss + is_in * share * per_token.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), config.optimizer.gradient_clipping)
    return {name: p.grad for name, p in policy.named_parameters()}, loss.item()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("room", [10_000, 24])
def test_a_recipe_equals_plain_autograd_however_the_batch_is_cut(folders, recipe, room):
    settings = {"max_new_tokens": LONGEST, "mb_spec": MicroBatchConfig(room), **RECIPES[recipe]}
    model = tiny_models.policy(*folders, **settings)
    groups = make_groups(truncated=TRUNCATED)
    stats = model.compute_gradients(groups)
    expected, loss = naive(folders, groups, model._actor)
    assert stats.loss == pytest.approx(loss, rel=1e-4, abs=1e-6)
    for name, parameter in model._learner.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=2e-6, msg=name)
    assert (stats.kl_ref is None) == ("KL" not in recipe)
    assert stats.finite


@pytest.mark.slow
def test_the_figures_of_a_recipe_are_logged(folders):
    settings = {"max_new_tokens": LONGEST, "ppo_n_minibatches": 2, **RECIPES["overlong penalty"]}
    model = tiny_models.policy(folders[0], **settings)
    groups = make_groups()
    metrics = model.compute_gradients(groups).metrics()
    lengths = [len(rollout.completion.token_ids) for group in groups for rollout in group.rollouts]
    penalties = [-max(0, length - 4) / 5 * 0.7 for length in lengths]
    assert metrics["grpo_actor/overlong_penalty/avg"] == pytest.approx(sum(penalties) / len(penalties))
    assert metrics["grpo_actor/n_minibatches"] == 2


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"entropy_freq_steps": 2}, [0, 2]),
        ({"entropy_freq_steps": None}, []),
        ({"entropy_freq_steps": None, "entropy_coeff": 0.3}, [0, 1, 2]),
    ],
)
def test_the_entropy_is_a_figure_of_the_steps_that_compute_it(folders, settings, steps):
    """Of a step that does without there is no figure: 0 would be a collapsed policy's."""
    model = tiny_models.policy(folders[0], ppo_n_minibatches=2, **settings)
    found = {}
    for step in range(3):
        model.compute_gradients(make_groups(seed=step))
        stats = model.step_ahead()
        model.commit()
        metrics = stats.metrics()
        if "grpo_actor/entropy/avg" in metrics:
            found[step] = metrics["grpo_actor/entropy/avg"]
        assert stats.entropy == found.get(step)
    assert [*found] == steps
    assert all(value > 0 for value in found.values())


def test_where_every_completion_is_left_out_nothing_moves(folders):
    model = tiny_models.policy(folders[0], mask_truncated_completions=True)
    before = {name: tensor.numpy().tobytes() for name, tensor in state_of(model)[1].items()}
    stats = model.compute_gradients(make_groups(truncated=range(12)))
    assert (stats.loss, stats.n_learning, stats.finite) == (0.0, 0, True)
    model.commit()
    assert {name: tensor.numpy().tobytes() for name, tensor in state_of(model)[1].items()} == before
    assert not math.isnan(stats.entropy)
