"""The trainer's plan against the most that torch's tensors take at once in a pass, counted by `MemTracker`.

The tensors are fake: shapes as large as a published model's, and no memory. Two layers, since each is alike.
"""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, AutoModelForCausalLM

from actors.model.token_logprobs import LogprobModel
from actors.model.torch_settings import checkpoint_layers
from launcher.checkpoints.model_shape import known_shape
from launcher.config.compose import compose
from launcher.resources.memory_estimate import trainer
from tests.support.preflight_parts import changed

LAYERS, WIDTH = 2, 512
SMALL = replace(known_shape("Qwen/Qwen2.5-0.5B-Instruct"), layers=LAYERS)
TRANSIENT = ("activations", "logits", "bfloat16 copy", "embedding's gradient")


def counted(actor, shape):
    """Bytes beside weights and gradients, which were there before the pass."""
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied,
    )
    n = actor.mb_spec.max_tokens_per_mb
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        if actor.gradient_checkpointing:
            checkpoint_layers(model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        ids = torch.zeros(n // WIDTH, WIDTH, dtype=torch.int64)
        positions, tracker = torch.arange(n), MemTracker()
        tracker.track_external(model)
        with tracker:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=actor.dtype == "bfloat16"):
                logprobs, _ = LogprobModel(model)(ids, positions, torch.zeros_like(positions), temperature=1.0)
            logprobs.sum().backward()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    return peak["Total"] - 2 * 4 * shape.parameters


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("dtype", "checkpointing", "tokens"),
    [("bfloat16", True, 1024), ("bfloat16", False, 8192), ("bfloat16", True, 16384), ("float32", True, 1024)],
)
def test_the_most_at_once_is_planned(tied, dtype, checkpointing, tokens):
    config = changed(
        compose(["conf=gsm8k_h200"]),
        actor__dtype=dtype,
        actor__gradient_checkpointing=checkpointing,
        actor__mb_spec__max_tokens_per_mb=tokens,
    )
    shape = replace(SMALL, tied=tied)
    planned = sum(item.bytes for item in trainer(config, shape, on_gpu=True) if item.what in TRANSIENT)
    found = counted(config.actor, shape)
    assert 0.7 * planned <= found <= 1.05 * planned
