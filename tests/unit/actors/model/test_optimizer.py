"""The course of the learning rate by hand, and what weight decay acts on."""

import pytest
import torch

from actors.model.optimizer import build_optimizer, learning_rate
from launcher.base.errors import ConfigError
from launcher.config.schema import OptimizerConfig


@pytest.mark.parametrize(
    ("schedule", "ratio", "expected"),
    [
        ("constant", 0.1, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", 0.0, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ("linear", 0.2, [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ("cosine", 0.0, [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0]),
    ],
)
def test_learning_rate_by_hand(schedule, ratio, expected):
    config = OptimizerConfig(lr=3e-4, warmup_steps=2, lr_scheduler_type=schedule, min_lr_ratio=ratio)
    rates = [learning_rate(step, total_steps=6, config=config) for step in range(8)]
    assert rates == pytest.approx([3e-4 * share for share in expected], abs=1e-9)


def test_a_run_that_is_all_warm_up_still_has_a_rate():
    config = OptimizerConfig(lr=1.0, warmup_steps=4, lr_scheduler_type="linear")
    assert [learning_rate(step, total_steps=4, config=config) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_weight_decay_spares_norms_and_biases():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.5))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 0.95 if name == "0.weight" else 1.0  # 1 - lr · weight_decay
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (OptimizerConfig(type="sgd"), r"actor\.optimizer\.type=sgd can't be made"),
        (OptimizerConfig(lr_scheduler_type="step"), r"actor\.optimizer\.lr_scheduler_type is 'step'"),
    ],
)
def test_an_unknown_word_names_its_setting(config, key):
    with pytest.raises(ConfigError, match=key):
        build_optimizer(torch.nn.Linear(1, 1), config)
        learning_rate(0, total_steps=1, config=config)
