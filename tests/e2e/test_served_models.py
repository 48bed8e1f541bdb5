"""A tiny random model of each family takes a GRPO step, the real SGLang loads its weights, and both say the same.

`pytest tests/e2e/test_served_models.py --long -rP` prints the distances; docs/recipes.md has the largest.
"""

import random
import shutil

import pytest
import torch

from actors.model.policy_model import PolicyModel
from launcher.base.rollouts import Prompt, Rollout, RolloutGroup
from launcher.checkpoints.model_shape import FAMILIES
from tests.support.real_server import MODEL, Serving, deadline_s
from tests.support.tiny_models import actor, make_groups, make_model, reference

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SIZES = {"vocab_size": 277, "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
PROMPT = tuple(random.Random(1).randrange(274) for _ in range(40))
LONGROPE = {"rope_type": "longrope", "short_factor": [1.1] * 8, "long_factor": [4.0] * 8, "rope_theta": 1e4}
MODELS = {kind: (kind, {}) for kind in FAMILIES} | {
    "gemma3_text": ("gemma3_text", {"initializer_range": 0.05}),  # else its embeddings drown its layers
    "phi3 with longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
}
EACH_TIME = ("gemma3_text",)
"""What differs most from the others: norms around both halves of a layer, two kinds of attention, scaled embeddings.
The rest is tried with --long, before a new SGLang or transformers is taken."""
NOISE, CHANGED = 5e-5, 1e-2


@pytest.fixture
def served(request, tmp_path):
    """A model in a trainer, and the server that was started with its first weights."""
    kind, settings = request.param
    folder = make_model(tmp_path / "model", kind, **SIZES, **settings)
    for file in (*MODEL.glob("tokenizer*"), MODEL / "chat_template.jinja"):
        shutil.copy(file, folder)
    policy = PolicyModel(actor(folder), reference(folder), temperature=1.0, total_steps=10)
    serving = Serving(tmp_path, folder)
    serving.prompt = PROMPT
    serving.start()
    yield policy, serving
    serving.run(lambda _: serving.server.close())
    serving.loop.close()


def learn(policy):
    """A step; and norms and biases far from the ones and zeros that they begin with."""
    policy.compute_gradients(make_groups())
    policy.commit()
    torch.manual_seed(3)
    for _, weight in policy.named_weights(torch.float32):
        if weight.ndim == 1:
            weight.add_(0.3 * torch.randn_like(weight))


def distance(policy, completions):
    """As the trainer measures it in each step."""
    rollouts = tuple(Rollout(completion=one, text="", reward=float(at)) for at, one in enumerate(completions))
    group = RolloutGroup(prompt=Prompt(id="p", token_ids=PROMPT, record={}), rollouts=rollouts)
    return policy.compute_gradients([group]).logprob_distance


@pytest.mark.parametrize(
    "served",
    [pytest.param(MODELS[name], id=name, marks=() if name in EACH_TIME else pytest.mark.long) for name in MODELS],
    indirect=True,
)
def test_the_server_says_what_the_trainer_says(served, tmp_path):
    policy, serving = served
    first = [serving.generate() for _ in range(2)]
    assert distance(policy, first).max < NOISE
    learn(policy)
    assert distance(policy, first).mean > CHANGED
    (tmp_path / "learned").mkdir()
    policy.export(tmp_path / "learned", torch.float32)
    serving.run(
        lambda client: client.update_weights_from_disk(
            serving.url, path=tmp_path / "learned", weight_version=serving.next_version(), timeout_s=deadline_s()
        )
    )
    found = distance(policy, [serving.generate() for _ in range(4)])
    print(f"mean {found.mean:.1e}, largest {found.max:.1e}")
    assert found.max < NOISE
