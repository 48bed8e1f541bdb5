"""actor.gather_dtype=bfloat16 on two real ranks: what travels, what stays float32, and how far gradients are off."""

import pytest
import torch

from actors.model.policy_model import PolicyModel
from tests.support.rank_pair import Pair, gradients
from tests.support.tiny_models import actor, make_groups, policy, reference, state_of

TEMPERATURE = 0.8
BFLOAT16 = {"dtype": "bfloat16", "gather_dtype": "bfloat16"}


@pytest.fixture
def two(second, folder):
    of_both = actor(folder, **BFLOAT16), reference(folder, "float32")
    crew = Pair(second, *of_both, TEMPERATURE)
    model = PolicyModel(*of_both, temperature=TEMPERATURE, total_steps=10, ranks=crew)
    yield model
    model.close()


def mean_distance(ours, theirs):
    """Over all tensors, of the largest difference as a share of the largest entry."""
    assert ours.keys() == theirs.keys()
    each = [(ours[name] - theirs[name]).abs().max() / theirs[name].abs().max() for name in theirs]
    return torch.stack(each).mean().item()


@pytest.mark.slow
def test_weights_travel_in_bfloat16_and_all_that_is_kept_is_float32(folder, two, tmp_path):
    seen = set()
    model = two._learner.model
    for layer in (model.model.layers[0].self_attn.q_proj, model.model.norm):
        layer.register_forward_pre_hook(lambda module, given: seen.add((module.weight.dtype, given[0].dtype)))
    exact, cast = policy(folder, temperature=TEMPERATURE), policy(folder, temperature=TEMPERATURE, dtype="bfloat16")
    for one in (exact, cast, two):
        one.compute_gradients(make_groups())
    assert {weight for weight, _ in seen} == {torch.bfloat16}
    assert (torch.bfloat16, torch.float32) in seen, "the residual stream is float32, as with autocast on one rank"
    found = two._ranks.gradients(two._learner)
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    far, usual = (mean_distance(one, gradients(exact._learner)) for one in (found, gradients(cast._learner)))
    assert 0 < far < 1.5 * usual, "no farther from float32 than autocast is (measured: 0.97 times)"

    two.step_ahead()
    two.commit()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    moments = [part for state in two._learner.optimizer.state.values() for part in state.values()]
    assert {moment.dtype for moment in moments} == {torch.float32}
    two.save(tmp_path / "state")
    cast.discard()
    cast.load(tmp_path / "state")
    theirs, ours = state_of(cast)[1], state_of(two)[1]
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours), "a checkpoint is as one rank's"
