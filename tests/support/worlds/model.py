"""The model of known gradients, and how near two of them are."""

import functools

import torch

from actors.model.micro_batches import batches_of, lay_out
from tests.support import tiny_models

TEMPERATURE = 0.8


policy = functools.partial(tiny_models.policy, temperature=TEMPERATURE)


def share_out(sequences, learning, max_tokens, *, ranks):
    """The micro-batches of each rank."""
    return batches_of(sequences, lay_out([len(one) for one in sequences], learning, max_tokens, ranks=ranks))


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model._learner.model.named_parameters()}


def bits(tensors):
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def close(ours, expected, **tolerance):
    assert ours.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(ours[name], expected[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)
