"""Optimizers by import path: a run that is cut continues bit for bit, from disk and from memory."""

import dataclasses
import json

import pytest
import torch

from actors.model.optimizer import build_optimizer
from actors.model.policy_model import PolicyModel
from launcher.base.errors import CheckpointError, ConfigError, TrainerError
from launcher.checkpoints.manifest import FACTS_FILE, TENSORS_FILE
from launcher.checkpoints.tensor_files import read_entries
from launcher.checkpoints.verification import _state_problems, verify
from launcher.config.fingerprint import config_fingerprint, fingerprint_differences
from launcher.config.schema import OptimizerConfig
from launcher.resources.preflight import PROBE_OPTIMIZER, _tried
from tests.support.preflight_parts import ARITHMETIC, changed
from tests.support.tiny_models import actor, make_groups, make_model, reference, train, weights
from tests.support.worlds.training import Trial

EIGHT_BIT = "torchao.optim:AdamW8bit"


class Momentum(torch.optim.SGD):
    """Needs one more argument than it is given; its state is there after the first step."""

    def __init__(self, params, lr, weight_decay):
        super().__init__(params, lr=lr, momentum=0.9, weight_decay=weight_decay)


class Counting(torch.optim.SGD):
    """Keeps a figure where no checkpoint looks."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


class Plain(torch.optim.Optimizer):
    """Counts steps in a plain number, and keeps bytes."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                if one.grad is not None:
                    state.setdefault("step", 0)
                    state.setdefault("signs", torch.zeros_like(one, dtype=torch.uint8))
                    state["step"] += 1
                    state["signs"] ^= (one.grad > 0).to(torch.uint8)
                    one.sub_(group["lr"] / [1, 2, 3, 4, 5, 6][state["step"]] * (state["signs"] - 0.5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), hidden_size=64, intermediate_size=128, num_hidden_layers=1)


@pytest.fixture(scope="module")
def square(tmp_path_factory):
    """Of two shapes alone, one for eight bits and one too small for them: the step is compiled for each shape."""
    one = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 64, "vocab_size": 64}
    return make_model(
        tmp_path_factory.mktemp("square"), num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, **one
    )


def policy(folder, kind, **settings):
    optimizer = OptimizerConfig(type=kind, lr=1e-2, weight_decay=0.1)
    config = actor(folder, optimizer=optimizer, **settings)
    return PolicyModel(config, reference(folder), temperature=1.0, total_steps=6, tokenizer_path=str(folder))


def same(left, right):
    return all(torch.equal(left[name], weight) for name, weight in right.items())


@pytest.mark.parametrize(
    "kind",
    [
        *("torch.optim:SGD", "torch.optim:Adafactor", "torch.optim:NAdam", "torch.optim:RMSprop"),
        *(f"{__name__}:Momentum", f"{__name__}:Plain"),
        pytest.param(EIGHT_BIT, marks=[pytest.mark.slow, pytest.mark.timeout(300)]),  # its step is compiled to C++
    ],
)
def test_four_steps_are_two_then_a_restart_then_two(folder, square, tmp_path, kind):
    if kind == EIGHT_BIT:
        pytest.importorskip("torchao")
        folder = square
    whole = weights(train(policy(folder, kind), [0, 1, 2, 3]))
    half = train(policy(folder, kind), [0, 1])
    assert not same(weights(half), whole)
    half.save(tmp_path / "disk")
    (tmp_path / "memory").mkdir()
    half.write_state(tmp_path / "memory", half.training_state())
    stored = read_entries(tmp_path / "memory" / TENSORS_FILE)
    assert kind != EIGHT_BIT or "U8" in {one.dtype for name, one in stored.items() if "exp_avg.codes" in name}
    for where in ("disk", "memory"):
        resumed = policy(folder, kind)
        train(resumed, [9])  # what it learnt since is forgotten
        resumed.load(tmp_path / where)
        assert same(whole, weights(train(resumed, [2, 3]))), where


def test_a_later_part_that_is_not_finite_undoes_the_earlier_ones(folder):
    model, twin = (train(policy(folder, f"{__name__}:Plain", ppo_n_minibatches=3), [0]) for _ in range(2))
    before, groups = weights(model), make_groups(seed=7)
    broken = dataclasses.replace(groups[2].rollouts[0], reward=None)
    groups[2] = dataclasses.replace(groups[2], rollouts=(broken, *groups[2].rollouts[1:]))
    assert model.compute_gradients(groups).finite
    assert not model.step_ahead().finite
    model.discard()
    assert same(before, weights(model))
    assert same(weights(train(twin, [2])), weights(train(model, [2])))


def test_adamw_by_its_path_is_adamw(folder):
    ours, theirs = (weights(train(policy(folder, kind), [0, 1])) for kind in ("adamw", "torch.optim:AdamW"))
    for name, weight in ours.items():
        torch.testing.assert_close(theirs[name], weight, rtol=1e-5, atol=1e-6)


def test_the_state_of_another_optimizer_is_refused_and_changes_nothing(folder, tmp_path):
    kinds = ("adamw", "torch.optim:NAdam")
    for kind in kinds:
        train(policy(folder, kind), [0]).save(tmp_path / kind)
    for kind, other in (kinds, kinds[::-1]):
        model = policy(folder, kind)
        before = weights(model)
        with pytest.raises(CheckpointError, match="is of another optimizer"):
            model.load(tmp_path / other)
        assert same(before, weights(model))
    prints = [config_fingerprint(changed(ARITHMETIC, actor__optimizer__type=kind)) for kind in kinds]
    assert "actor.optimizer.type" not in prints[0], "as it always was"
    (difference,) = fingerprint_differences(*prints)
    assert "is 'torch.optim:NAdam': the saved moments are another optimizer's" in str(difference)


def test_one_that_keeps_more_than_a_checkpoint_holds_is_refused(folder):
    with pytest.raises(TrainerError, match="changes figures beside its parameters' state"):
        train(policy(folder, f"{__name__}:Counting"), [0])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("no_such_package.optim:Lion", "No module named 'no_such_package'"),
        ("torch.optim:Lion", "has no attribute 'Lion'"),
        ("torch.nn:Linear", "it is no torch.optim.Optimizer"),
        ("torch.optim:LBFGS", "missing a required argument: 'closure'"),
    ],
)
def test_what_can_not_be_made_is_one_message(kind, said):
    with pytest.raises(ConfigError, match=rf"actor\.optimizer\.type={kind} can't be made: .*{said}"):
        build_optimizer(torch.nn.Linear(1, 1), OptimizerConfig(type=kind))


def test_one_that_needs_sparse_gradients_is_refused_when_it_is_made():
    """It fails at its first step otherwise, after servers and trainer were started."""
    with pytest.raises(ConfigError) as refused:
        build_optimizer(torch.nn.Linear(1, 1), OptimizerConfig(type="torch.optim:SparseAdam"))
    assert refused.value.message == (
        "actor.optimizer.type=torch.optim:SparseAdam needs sparse gradients, and a model's are dense"
    )
    assert refused.value.hint == "set it to adamw, or to module:Class of an optimizer that takes dense gradients"


@pytest.mark.parametrize("kind", ["torch.optim:SGD", "torch.optim:Adagrad", "torch.optim:RMSprop"])
def test_one_that_takes_dense_gradients_is_made_whether_it_takes_sparse_ones_or_not(kind):
    assert build_optimizer(torch.nn.Linear(1, 1), OptimizerConfig(type=kind)).state_dict()["param_groups"]


@pytest.mark.slow
def test_before_anything_starts_it_is_made_in_another_process():
    def said(kind):
        argument = json.dumps(dataclasses.asdict(OptimizerConfig(type=kind)))
        tried = _tried(PROBE_OPTIMIZER, argument, key="actor.optimizer.type", kind=ConfigError)
        return [str(error) for error in tried]

    assert said("torch.optim:RMSprop") == []
    (message,) = said("torch.optim:SparseAdam")
    assert message.startswith("actor.optimizer.type=torch.optim:SparseAdam needs sparse gradients")


@pytest.mark.slow
def test_its_checkpoints_are_verified_part_by_part(tmp_path):
    one = Trial(tmp_path, steps=2, recipe={"optimizer": OptimizerConfig(type="torch.optim:NAdam")}, memory=False)
    assert one.run()
    folder = one.store.list()[-1].path
    assert list(verify(folder).problems) == []
    facts = json.loads((folder / FACTS_FILE).read_text())
    name, parts = next(iter(facts["optimizer_parts"].items()))
    assert sorted(parts) == ["exp_avg", "exp_avg_sq", "mu_product", "step"]
    entries = dict(read_entries(folder / TENSORS_FILE))
    del entries[f"mu_product.{name}"]
    assert list(_state_problems(facts, entries, {})) == [f"it lacks mu_product.{name}"]
