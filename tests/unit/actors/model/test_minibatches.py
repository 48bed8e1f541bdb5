"""Several optimizer steps for a batch: each as on a batch of its own, and all of them or none."""

import dataclasses

import pytest
import torch

from actors.model import learner
from actors.model.optimizer import parts_of
from launcher.base.errors import TrainerError
from launcher.config.schema import OptimizerConfig
from tests.support import tiny_models
from tests.support.tiny_models import make_groups, state_of

STEADY = OptimizerConfig(lr=1e-2)


def policy(folder, **settings):
    return tiny_models.policy(folder, optimizer=STEADY, **settings)


def bits(model):
    facts, tensors = state_of(model)
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()} | {"steps": facts["optimizer_steps"]}


def take(model, groups):
    model.compute_gradients(groups)
    stats = model.step_ahead()
    model.commit()
    return stats


def test_the_parts_of_a_batch_are_steps_on_batches_of_their_own(folder):
    together, apart = policy(folder, ppo_n_minibatches=2), policy(folder)
    for seed in range(2):
        groups = make_groups(seed=seed, groups=5)
        take(together, groups)
        take(apart, groups[:3])
        take(apart, groups[3:])
    assert bits(together) == bits(apart)
    assert (together.policy_version, apart.policy_version) == (2, 4)


@pytest.mark.slow
def test_figures_are_of_all_parts_and_distances_of_the_weights_before(folder):
    groups = make_groups()
    whole = policy(folder).compute_gradients(groups)
    model = policy(folder, ppo_n_minibatches=3)
    first = model.compute_gradients(groups)
    assert first.n_tokens < whole.n_tokens
    assert first.logprob_distance.mean == pytest.approx(whole.logprob_distance.mean, rel=1e-5)
    last = model.step_ahead()
    assert (last.n_tokens, last.n_learning) == (whole.n_tokens, whole.n_learning)
    assert last.logprob_distance == first.logprob_distance
    assert last.approx_kl != pytest.approx(whole.approx_kl), "later parts are of moved weights"


@pytest.mark.slow
def test_old_logprobs_of_the_trainer_are_those_before_the_batch(folder):
    groups = make_groups()
    model, told = policy(folder, ppo_n_minibatches=3, recompute_logprob=True), policy(folder, ppo_n_minibatches=3)
    exact = [
        dataclasses.replace(
            group,
            rollouts=tuple(
                dataclasses.replace(
                    one,
                    completion=dataclasses.replace(
                        one.completion, logprobs=tuple(told.logprobs(group.prompt.token_ids, one.completion.token_ids))
                    ),
                )
                for one in group.rollouts
            ),
        )
        for group in groups
    ]
    stats = take(model, groups)
    take(told, exact)
    assert stats.ratio_mean != pytest.approx(1, abs=1e-4), "the ratio is 1 in the first part only"
    for name, weight in model.named_weights(torch.float32):
        torch.testing.assert_close(weight, dict(told.named_weights(torch.float32))[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_later_part_that_is_not_finite_undoes_the_earlier_ones(folder, steps_before):
    model, untouched = (policy(folder, ppo_n_minibatches=3, recompute_logprob=True) for _ in range(2))
    for seed in range(steps_before):
        take(model, make_groups(seed=seed)), take(untouched, make_groups(seed=seed))
    before = bits(model)
    groups = make_groups(seed=7)
    broken = dataclasses.replace(groups[2].rollouts[0], reward=None)
    groups[2] = dataclasses.replace(groups[2], rollouts=(broken, *groups[2].rollouts[1:]))
    assert model.compute_gradients(groups).finite, "of the first part"
    stats = model.step_ahead()
    assert not stats.finite
    with pytest.raises(TrainerError, match="must not be committed"):
        model.commit()
    model.discard()
    assert bits(model) == before
    assert model.policy_version == steps_before
    take(model, make_groups(seed=8)), take(untouched, make_groups(seed=8))
    assert bits(model) == bits(untouched)


def test_a_part_that_fails_undoes_the_earlier_ones(folder, monkeypatch):
    model = policy(folder, ppo_n_minibatches=3)
    before = bits(model)
    model.compute_gradients(make_groups())
    run, asked = model._objective.run, []

    def out_of_memory(*of_micro_batch):
        asked.append(of_micro_batch)
        if len(asked) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(*of_micro_batch)

    monkeypatch.setattr(model._objective, "run", out_of_memory)
    with pytest.raises(TrainerError, match="out of memory while training"):
        model.step_ahead()
    assert bits(model) == before
    with pytest.raises(TrainerError, match="no gradients to commit"):
        model.commit()


@pytest.mark.parametrize(("parts", "copies"), [(1, 0), (2, 1), (4, 1)])
def test_however_many_parts_a_batch_has_the_state_is_copied_once(folder, monkeypatch, parts, copies):
    """Of a GPU's state each copy goes through the host's memory."""
    model = policy(folder, ppo_n_minibatches=parts)
    take(model, make_groups(groups=4))  # AdamW's moments are there from now on
    copied, copy = [], learner._copied

    def counted(tensor):
        copied.append(tensor.nbytes)
        return copy(tensor)

    monkeypatch.setattr(learner, "_copied", counted)
    take(model, make_groups(seed=1, groups=4))
    tensors = [part for state in model._learner.optimizer.state.values() for part in parts_of(state).values()]
    assert sum(copied) == copies * sum(one.nbytes for one in (*tensors, *model._learner.parameters.values()))


def test_a_commit_does_not_skip_the_parts_before_the_last(folder):
    model = policy(folder, ppo_n_minibatches=2)
    before = bits(model)
    model.compute_gradients(make_groups())
    with pytest.raises(TrainerError, match="several optimizer steps"):
        model.commit()
    assert bits(model) == before


def answered(model, groups):
    """`groups` as a server answers them that holds the model's weights now."""

    def of(group, rollout):
        made = rollout.completion
        logprobs = tuple(model.logprobs(group.prompt.token_ids, made.token_ids))
        completion = dataclasses.replace(made, logprobs=logprobs, weight_version=model.policy_version)
        return dataclasses.replace(rollout, completion=completion)

    return [dataclasses.replace(g, rollouts=tuple(of(g, one) for one in g.rollouts)) for g in groups]


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
        model = tiny_models.policy(folder, optimizer=OptimizerConfig(lr=3e-2, warmup_steps=0), **settings)
        older = answered(model, make_groups(seed=7))
        model.compute_gradients(answered(model, make_groups(seed=8)))
        model.commit()
        clipped = model.compute_gradients(older).metrics()
        grads = [one.grad.flatten() for one in model._learner.parameters.values() if one.grad is not None]
        found[name] = torch.cat(grads), clipped["grpo_actor/clip_ratio/low"] + clipped["grpo_actor/clip_ratio/high"]
    gradient, cut = found["decoupled"]
    assert cut == 0 < found["clipped"][1]
    assert torch.allclose(gradient, found["unclipped"][0], rtol=0, atol=1e-5 * gradient.abs().max().item())
    assert (found["clipped"][0] - gradient).abs().max() > 1e-2 * gradient.abs().max()
