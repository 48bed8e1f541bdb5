"""What is committed passes its own verification and resumes exactly, after every kind of step."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.model.policy_model import PolicyModel
from launcher.base.rollouts import RolloutGroup
from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.health_evidence import HealthEvidence
from launcher.checkpoints.manifest import FACTS_FILE
from launcher.checkpoints.trial_folders import find_trial
from launcher.checkpoints.verification import verify
from launcher.config.schema import OptimizerConfig
from tests.support.checkpoint_makers import EXPERIMENT, TRIAL, USER, edit_tensors, make_trial, reseal, save
from tests.support.replay import Replay, group, prompts
from tests.support.tiny_models import actor, make_groups, make_model, reference, train, weights
from tests.support.worlds.training import N_PROMPTS, SAMPLES, AheadReplay, Trial, identical
from tests.support.worlds.training import trial as sampling_trial

MATRIX, OTHER = "model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.q_proj.weight"
NO_REWARD = [[0.0] * 4] * 3
LORA = {"use_lora": True, "lora_rank": 2, "lora_alpha": 4.0}


class OnlyNorms(torch.optim.SGD):
    """Leaves every matrix as it is, and looks at the state of each."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (one for parameters in self.param_groups for one in parameters["params"]):
            state = self.state[parameter]
            if parameter.grad is not None and parameter.ndim == 1:
                state.setdefault("step", 0)
                state["step"] += 1
                parameter.sub_(0.01 / state["step"] * parameter.grad)


RECIPES = {
    "adamw": {},
    "adamw in bfloat16": {"dtype": "bfloat16"},
    "adamw in long steps": {"optimizer": OptimizerConfig(lr=5e-2)},
    "two steps a batch": {"ppo_n_minibatches": 2},
    "adapters": LORA,
    "adapters in bfloat16": {**LORA, "dtype": "bfloat16"},
    **{
        kind: {"optimizer": OptimizerConfig(type=kind, lr=1e-2, weight_decay=0.1)}
        for kind in (
            "torch.optim:SGD",
            "torch.optim:NAdam",
            "torch.optim:Adafactor",
            "torch.optim:Adagrad",
            f"{__name__}:OnlyNorms",
        )
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def policy(folder, recipe):
    config = actor(folder, **RECIPES[recipe])
    return PolicyModel(config, reference(folder, config.dtype), temperature=1.0, total_steps=10)


# ── what may happen to a model before it is saved ──


def learns(model):
    train(model, [model.policy_version])


def earns_nothing(model):
    """Without an advantage there is no gradient, and the step is committed all the same."""
    model.compute_gradients(make_groups(seed=model.policy_version, rewards=NO_REWARD))
    model.step_ahead()
    model.commit()


def earns_in_one_part(model):
    """Of a batch with several optimizer steps, only one has a gradient."""
    model.compute_gradients(make_groups(seed=3, rewards=[[0.0, 1.0, 0.0, 0.0], *NO_REWARD[1:]]))
    model.step_ahead()
    model.commit()


def is_not_finite(model):
    """The batch is dropped, and the policy stays at its version."""
    groups = make_groups(seed=5)
    broken = replace(groups[2].rollouts[0], reward=None)
    groups[2] = replace(groups[2], rollouts=(broken, *groups[2].rollouts[1:]))
    stats = model.compute_gradients(groups)
    assert not (stats.finite and model.step_ahead().finite)
    model.discard()


def begins_anew(model):
    model.begin_anew()


HISTORIES = (
    [earns_nothing],  # the first one's model is new, the others' has begun anew
    [],
    [is_not_finite, earns_nothing],
    [learns, is_not_finite, earns_nothing],
    [earns_in_one_part, earns_nothing, learns],
    [learns, earns_in_one_part, begins_anew, earns_nothing],
)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_state_is_verified_and_resumes_whatever_happened(folder, tmp_path, recipe):
    model, resumed = policy(folder, recipe), policy(folder, recipe)
    for number, history in enumerate(HISTORIES):
        learns(resumed)  # what it has learnt is forgotten
        model.begin_anew()
        for happening in history:
            happening(model)
        committed = save(CheckpointStore(tmp_path / str(number) / "default"), model, model.policy_version)
        assert verify(committed.path).why_not == "", history
        resumed.load(committed.path)
        for _ in range(2):
            for one in (model, resumed):
                learns(one)
        identical(weights(resumed), weights(model))


# ── what the step loop commits ──


class Zeros(AheadReplay):
    """Each group is filtered, since all its rewards are equal."""

    async def _make(self, prompt, weights, tally, kept):
        return unsolved(group(prompt, SAMPLES, weights.oldest))


def unsolved(made):
    return RolloutGroup(prompt=made.prompt, rollouts=tuple(replace(one, reward=0.0) for one in made.rollouts))


def unsolved_batch(batch):
    return replace(batch, groups=tuple(map(unsolved, batch.groups)))


def without_reward(root, **given):
    return Trial(root, rollouts=Replay(prompts(N_PROMPTS), SAMPLES, spoil=unsolved_batch), **given)


def not_finite_once(root, **given):
    spoilt = []

    def spoil(batch):
        if spoilt or batch.groups[0].rollouts[0].completion.weight_version != 1:
            return unsolved_batch(batch)
        spoilt.append(True)
        first, *others = batch.groups[0].rollouts
        broken = replace(
            first, completion=replace(first.completion, logprobs=(math.nan, *first.completion.logprobs[1:]))
        )
        return replace(batch, groups=(replace(batch.groups[0], rollouts=(broken, *others)), *batch.groups[1:]))

    return Trial(root, rollouts=Replay(prompts(N_PROMPTS), SAMPLES, spoil=spoil), **given)


def all_filtered(root, **given):
    return sampling_trial(root, rollouts=Zeros(ahead=0, most_batches=2), **given)


@pytest.mark.slow
@pytest.mark.parametrize("launch", [without_reward, not_finite_once, all_filtered])
def test_a_run_that_has_learnt_nothing_yet_goes_on_where_it_was(tmp_path, launch):
    first = launch(tmp_path, steps=3)
    first.config.gate.distance_float32 = first.config.gate.distance_bfloat16 = None  # the log-probs are made up
    first.loop._gate._rules = type(first.loop._gate._rules).of(first.config)
    assert first.run()
    for committed in first.store.list():
        assert verify(committed.path).why_not == ""
    second = launch(tmp_path, steps=4, resume=True)
    assert second.loop.next_step == 3


# ── what verification says of them ──


@pytest.fixture
def untaught(folder, tmp_path):
    """Of a model in which a matrix is all zero from the first, as of a layer that is added to be trained."""
    source = make_model(tmp_path / "zeroed", num_hidden_layers=1)
    content = load_file(source / "model.safetensors")
    save_file(content | {MATRIX: torch.zeros_like(content[MATRIX])}, source / "model.safetensors", {"format": "pt"})

    def made(*, steps, recipe="adamw"):
        model = policy(source, recipe)
        for _ in range(steps):
            earns_nothing(model)
        return save(CheckpointStore(tmp_path / "default"), model, model.policy_version).path

    return made


@pytest.mark.parametrize("recipe", ["adamw", "adapters", "torch.optim:SGD"])
def test_a_matrix_that_no_gradient_has_reached_may_be_as_the_first_model_had_it(untaught, recipe):
    found = verify(untaught(steps=2, recipe=recipe))
    assert found.is_complete, found.why_not
    assert any(f"all zero: {MATRIX}; no gradient of them is stored" in note for note in found.notes)


def test_a_matrix_that_has_learnt_is_not_all_zero(folder, tmp_path):
    model = train(policy(folder, "adamw"), [0])
    path = save(CheckpointStore(tmp_path / "default"), model, 0).path
    edit_tensors(path, "model.safetensors", lambda tensors: tensors[OTHER].zero_())
    assert f"matrices that are all zero: {OTHER}" in verify(path).why_not


def test_moments_that_the_facts_do_not_know_are_named(folder, tmp_path):
    model = train(policy(folder, "torch.optim:NAdam"), [0])
    path = save(CheckpointStore(tmp_path / "default"), model, 0).path
    facts = json.loads((path / FACTS_FILE).read_text())
    assert facts["optimizer_parts"].pop(MATRIX)
    (path / FACTS_FILE).write_text(json.dumps(facts))
    reseal(path)
    assert f"{FACTS_FILE}: it knows nothing of exp_avg.{MATRIX}" in verify(path).why_not


def test_the_first_step_after_a_standstill_may_lead_far(folder, tmp_path):
    """Two checkpoints of the same weights, and then one of a large step: nothing else than training changed it."""
    model = policy(folder, "adamw in long steps")
    paths = make_trial(tmp_path, model, [1, 3])
    model.policy_version = 0  # for the learning rate, which falls
    train(model, range(10))
    save(CheckpointStore(paths.default_checkpoints), model, 5)
    catalog = CheckpointCatalog(find_trial(tmp_path, USER, EXPERIMENT, TRIAL), HealthEvidence())
    found = {entry.global_step: catalog.verified(entry).verification for entry in catalog.entries}
    assert [found[step].why_not for step in (1, 3, 5)] == ["", "", ""]
