"""The model of known gradients, and how near two of them are."""

import functools

import torch

from tests.support import tiny_models

TEMPERATURE = 0.8


policy = functools.partial(tiny_models.policy, temperature=TEMPERATURE)


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model._part.model.named_parameters()}


def bits(tensors):
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def close(ours, expected, **tolerance):
    assert ours.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(ours[name], expected[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)
