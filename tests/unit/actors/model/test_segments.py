"""Episodes in the objective: own tokens alone are trained on, and an episode weighs as one rollout."""

import math
from dataclasses import replace

import pytest
import torch

from actors.model.micro_batches import sequences_of
from actors.model.objective import Objective
from launcher.base.rollouts import Completion, Rollout, RolloutGroup, Segment
from tests.support import tiny_models
from tests.support.tiny_models import policy


def as_segments(group):
    """The same rollouts as episodes of one turn."""
    return RolloutGroup(
        prompt=group.prompt,
        rollouts=tuple(
            replace(
                rollout,
                segments=(
                    Segment(
                        prompt=group.prompt.token_ids,
                        completion=rollout.completion,
                        own=(True,) * len(rollout.completion.token_ids),
                    ),
                ),
            )
            for rollout in group.rollouts
        ),
    )


def segment(prompt, tokens, own, server="server-0"):
    """A token's log-prob is -1/10 of its id; where it isn't the model's, one that would show."""
    logprobs = tuple(-token / 10 if is_own else 0.0 for token, is_own in zip(tokens, own, strict=True))
    made = Completion(token_ids=tokens, logprobs=logprobs, weight_version=0, finish_reason="stop", server=server)
    return Segment(prompt=prompt, completion=made, own=own)


def rollout(reward, *segments):
    own = [
        (token, value)
        for one in segments
        for token, value, is_own in zip(one.completion.token_ids, one.completion.logprobs, one.own, strict=True)
        if is_own
    ]
    whole = replace(segments[0].completion, token_ids=tuple(t for t, _ in own), logprobs=tuple(v for _, v in own))
    return Rollout(completion=whole, text="", reward=reward, segments=segments, turns=2)


T, F = True, False
EPISODES = (
    rollout(1.0, segment((3, 4), (5, 6, 7, 8, 9), (T, T, F, F, T))),
    rollout(0.0, segment((3, 4), (9, 8), (T, T)), segment((3, 7, 6), (5, 10, 11), (T, F, T), server="server-1")),
)


def group_of(*rollouts):
    prompt = tiny_models.make_groups()[0].prompt
    return RolloutGroup(prompt=prompt, rollouts=rollouts)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model._learner.parameters.items()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss_aggregation": "sequence_mean", "importance_sampling_level": "sequence"},
        {"ppo_n_minibatches": 2, "kl_ctl": 0.1, "entropy_coeff": 0.01},
        {"loss_aggregation": "constant_length", "max_new_tokens": 16, "mask_truncated_completions": True},
    ],
)
def test_episodes_of_one_turn_are_bit_for_bit_what_plain_rollouts_are(folder, settings):
    groups = tiny_models.make_groups(truncated=(2,))
    plain, episodes = policy(folder, **settings), policy(folder, **settings)
    assert plain.compute_gradients(groups) == episodes.compute_gradients([as_segments(group) for group in groups])
    ours, theirs = gradients(plain), gradients(episodes)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_gradient_is_that_of_own_tokens_alone(folder):
    """Against autograd over the plain model, an optimizer step on whose own policy has the ratio 1."""
    model = policy(folder, recompute_logprob=True)
    stats = model.compute_gradients([group_of(*EPISODES)])
    found = gradients(model)
    assert stats.n_tokens == 3 + 4
    assert stats.n_learning == 3
    plain = policy(folder)._learner.model
    spread = math.sqrt(0.5) + 1e-6  # unbiased deviation of rewards 1 and 0
    loss = torch.zeros(())
    for episode, advantage in zip(EPISODES, (0.5 / spread, -0.5 / spread), strict=True):
        for one in episode.segments:
            ids = torch.tensor([[*one.prompt, *one.completion.token_ids]])
            logprobs = plain(ids).logits[0].log_softmax(dim=-1)
            for place, token in enumerate(one.completion.token_ids):
                if one.own[place]:
                    loss = loss - advantage * logprobs[len(one.prompt) + place - 1, token] / 7
    plain.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    for name, parameter in plain.named_parameters():
        assert torch.allclose(found[name], parameter.grad, atol=1e-6), name


def test_what_is_not_own_has_no_gradient_and_its_log_prob_says_nothing(folder):
    """The gradient of each logit: 0 everywhere but where an own token is predicted."""
    model = policy(folder)
    first = model.compute_gradients([group_of(*EPISODES)])
    before = gradients(model)
    lies = tuple(0.0 if is_own else 5.0 for is_own in EPISODES[0].segments[0].own)
    one = EPISODES[0].segments[0]
    spoiled = replace(
        one,
        completion=replace(one.completion, logprobs=tuple(map(sum, zip(one.completion.logprobs, lies, strict=True)))),
    )
    assert model.compute_gradients([group_of(replace(EPISODES[0], segments=(spoiled,)), EPISODES[1])]) == first
    assert all(torch.equal(value, before[name]) for name, value in gradients(model).items())
    (batch,) = model._objective.prepare([group_of(*EPISODES)])[0]
    asked = [(mb.input_ids.flatten()[mb.positions + 1].tolist(), mb.targets.tolist()) for mb in batch.micro_batches]
    assert all(next_tokens == targets for next_tokens, targets in asked)
    assert sorted(token for _, targets in asked for token in targets) == sorted((5, 6, 9, 9, 8, 5, 11))


def weights_of(aggregation):
    objective = Objective(
        tiny_models.actor("", loss_aggregation=aggregation), temperature=1.0, dtype=torch.float32, reference=None
    )
    groups = [group_of(*EPISODES)]
    (batch,) = objective.prepare(groups)[0]
    by_rollout = [0.0, 0.0]
    for sequence, weight in zip(sequences_of(groups), batch.weights.tolist(), strict=True):
        by_rollout[sequence.rollout] += weight * len(sequence.places)
    return by_rollout


def test_rollouts_weigh_alike_however_many_segments_they_have():
    assert weights_of("sequence_mean") == pytest.approx([0.5, 0.5])
    assert weights_of("token_mean") == pytest.approx([3 / 7, 4 / 7])


def test_parts_of_a_batch_keep_an_episode_together_and_distances_are_by_server(folder):
    groups = [group_of(*EPISODES), group_of(*reversed(EPISODES))]
    model = policy(folder, ppo_n_minibatches=2)
    stats = model.compute_gradients(groups)
    assert set(stats.logprob_distance.by_server) == {"server-0", "server-1"}
    parts = model._objective.prepare(groups)
    assert [len(part[0].weights) for part in parts] == [3, 3]
    assert model.step_ahead().finite
