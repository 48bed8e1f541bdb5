"""Recipes that contradict themselves, names of other launchers, and the line of the plan."""

import re

import pytest

from launcher.base.errors import ConfigError
from launcher.config.other_names import OTHER_KEYS, OTHER_NAMES, name_here
from launcher.config.recipe import AdvNormConfig, RecipeConfig, RewardNormConfig, describe_recipe, find_recipe_problems
from launcher.config.schema import RunConfig
from launcher.config.settings import settings_of
from launcher.resources.config_checks import find_problems
from tests.support.composed import composed

PENALTY = {"overlong_reward_penalty": True, "overlong_tokens": 4, "overlong_penalty_factor": 1.0}


def recipe(**settings):
    return RecipeConfig(max_new_tokens=24, **settings)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"ppo_n_minibatches": 9}, "actor.ppo_n_minibatches"),
        ({"policy_loss": "cispo", "c_clip": 3.0}, "actor.c_clip"),
        ({**PENALTY, "overlong_tokens": None}, "actor.overlong_tokens"),
        ({**PENALTY, "overlong_tokens": 25}, "actor.overlong_tokens"),
        ({**PENALTY, "overlong_reward_penalty": False, "overlong_tokens": None}, "actor.overlong_penalty_factor"),
        ({"adv_norm": AdvNormConfig(eps=1e-6)}, "actor.adv_norm.eps"),
        ({"dynamic_sampling": 2, "reward_norm": RewardNormConfig(mean_level="batch")}, "actor.dynamic_sampling"),
    ],
)
def test_what_contradicts_itself_is_named_once(settings, key):
    assert [found for found, _ in find_recipe_problems(recipe(**settings), batch_size=8)] == [key]


@pytest.mark.parametrize(
    "settings", [{}, PENALTY, {"ppo_n_minibatches": 8}, {"policy_loss": "cispo"}, {"adv_norm": AdvNormConfig("batch")}]
)
def test_what_may_be_asked_for(settings):
    assert not list(find_recipe_problems(recipe(**settings), batch_size=8))


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("actor.adv_norm.std=false", "actor.reward_norm.std_level"),
        ("actor.adv_norm.group_size=8", "gconfig.n_samples"),
        ("actor.mask_no_eos_with_zero=true", "actor.mask_truncated_completions"),
        ("+actor.adv_norm.std=true", "actor.reward_norm.std_level"),
        ("allocation_mode=sglang:d1+fsdp:d1", "sglang.n_servers"),
        ("group_size=8", "gconfig.n_samples"),
        ("exp_ctrl.ckpt_freq_secs=600", "recover.freq_secs"),
        ("dataset.train_bs_n_seqs=8", "train_dataset.batch_size"),
        ("dynamic_bs=true", "actor.dynamic_sampling=1"),
        ("actor.group_size=8", "gconfig.n_samples"),
        ("num_generations=8", "gconfig.n_samples"),
        ("beta=0.04", "actor.kl_loss_coef"),
        ("+actor.loss_type=dapo", "actor.loss_aggregation"),
        ("actor_rollout_ref.rollout.n=8", "gconfig.n_samples"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor.ppo_n_minibatches"),
    ],
)
def test_a_name_of_another_launcher_is_refused_with_ours(override, instead):
    with pytest.raises(ConfigError) as error:
        composed("conf=arithmetic_cpu", override)
    assert override.lstrip("+").partition("=")[0] in error.value.message
    assert instead in error.value.hint


@pytest.mark.parametrize("other", [*OTHER_KEYS, *OTHER_NAMES])
def test_what_a_name_of_another_launcher_leads_to_is_a_setting_here_and_the_name_is_not(other):
    known = {setting.key for setting in settings_of(RunConfig)}
    named = re.findall(r"^\w+$|(?:[a-z_]+\.)+[a-z_]+", name_here(other).partition(" (")[0])
    assert named
    assert all(one in known or any(name.startswith(f"{one}.") for name in known) for one in named)
    assert other not in {name.rpartition(".")[2] for name in known} | known


def test_the_field_s_safer_settings_are_taken():
    settings = ["rollout.request_timeout=7200", "rollout.request_retries=5", "sglang.mem_fraction_static=0.7"]
    config = composed("conf=gsm8k_h200", *settings, "sglang.gpu_fraction=1", "actor.device=cpu")
    assert find_problems(config) == []
    assert (config.rollout.request_timeout, config.rollout.request_retries) == (7200, 5)
    assert config.sglang.mem_fraction_static == 0.7


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("actor.adv_norm.mean_level=group", "actor.adv_norm.mean_level=group: allowed: batch"),
        ("actor.c_clip=1", "actor.c_clip=1: allowed: more than 1"),
        ("actor.policy_loss=gspo", "allowed: ppo, cispo"),
        ("actor.kl_estimator=k4", "allowed: k1, k2, k3"),
        ("actor.dynamic_sampling=0", "actor.dynamic_sampling=0: allowed: at least 1"),
    ],
)
def test_a_value_out_of_range_is_one_message(override, said):
    with pytest.raises(ConfigError) as error:
        composed("conf=arithmetic_cpu", override)
    assert said in error.value.message


def test_the_default_is_described_and_so_is_a_clip_that_can_not_act():
    assert describe_recipe(recipe()) == (
        "objective: ppo, token ratio in 0.8 … 1.28; loss: token_mean; "
        "advantage: the reward less the group's mean, over the group's deviation; 1 optimizer step a batch"
    )
    assert "nothing is clipped" in describe_recipe(recipe(recompute_logprob=True))
    assert "token ratio in" in describe_recipe(recipe(recompute_logprob=True, ppo_n_minibatches=2))
    replaced = describe_recipe(recipe(dynamic_sampling=3))
    assert "equal are left out and replaced, within the prompts of 3 batches a step" in replaced
    everything = describe_recipe(recipe(**PENALTY, c_clip=3.0, kl_ctl=0.1, kl_loss_coef=0.2, entropy_coeff=0.01))
    for part in (
        "at most 3",
        "last 4 tokens",
        "k1 KL × 0.1 off the reward",
        "k3 KL × 0.2 in the loss",
        "entropy × 0.01",
    ):
        assert part in everything
