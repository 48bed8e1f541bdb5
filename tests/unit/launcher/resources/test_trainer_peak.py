"""The trainer's plan against the most that torch's tensors take at once in a pass, counted by `MemTracker`.

The tensors are fake: shapes as large as a published model's, and no memory. Few layers, since each is alike. Ranks are
the first of several whose collective operations move nothing (torch's `fake` backend).
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from actors.model.rank_collectives import sharded
from actors.model.token_logprobs import LogprobModel
from actors.model.torch_settings import checkpoint_layers
from launcher.checkpoints.model_shape import known_shape
from launcher.resources.memory_estimate import trainer
from tests.support.composed import composed
from tests.support.preflight_parts import changed

WIDTH = 512
SMALL = replace(known_shape("Qwen/Qwen2.5-0.5B-Instruct"), layers=2)
WIDE = replace(SMALL, vocab=262144, hidden=2560, intermediate=10240, heads=8, kv_heads=4, head_dim=320)
"""As Gemma's: an embedding of several layers' size."""
SHAPES = {"tied": SMALL, "wide": WIDE, "wide untied": replace(WIDE, tied=False)}
TRANSIENT = ("activations", "logits", "bfloat16 copy", "embedding's gradient", "gathered")


@pytest.fixture
def meshes():
    """Makes the mesh of so many ranks, of which this is the first."""

    def make(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        return dist.device_mesh.init_device_mesh("cpu", (ranks,))

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def counted(actor, shape, mesh=None):
    """Bytes beside weights and gradients, which were there before the pass."""
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
    )
    n = actor.mb_spec.max_tokens_per_mb
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        if actor.gradient_checkpointing:
            checkpoint_layers(model)
        held = LogprobModel(model)
        if mesh is not None:
            sharded(held, mesh, in_bfloat16=actor.gather_dtype == "bfloat16")
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        ids = torch.zeros(n // WIDTH, WIDTH, dtype=torch.int64)
        positions, tracker = torch.arange(n), MemTracker()
        tracker.track_external(held)
        with tracker:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=actor.dtype == "bfloat16"):
                logprobs, _ = held(ids, positions, torch.zeros_like(positions), temperature=1.0)
            logprobs.sum().backward()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    return peak["Total"] - 2 * 4 * shape.parameters // actor.dp_size


def planned(config, shape):
    return sum(item.bytes for item in trainer(config, shape, on_gpu=True, rank=1) if item.what in TRANSIENT)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=SHAPES.keys())
@pytest.mark.parametrize(
    ("dtype", "checkpointing", "tokens"),
    [("bfloat16", True, 1024), ("bfloat16", False, 8192), ("bfloat16", True, 16384), ("float32", True, 1024)],
)
def test_the_most_at_once_is_planned(shape, dtype, checkpointing, tokens):
    config = changed(
        composed("conf=gsm8k_h200"),
        actor__dtype=dtype,
        actor__gradient_checkpointing=checkpointing,
        actor__mb_spec__max_tokens_per_mb=tokens,
    )
    shape = SHAPES[shape]
    assert 0.7 * planned(config, shape) <= counted(config.actor, shape) <= 1.05 * planned(config, shape)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=SHAPES.keys())
@pytest.mark.parametrize(
    ("ranks", "dtype", "gathered", "checkpointing", "tokens"),
    [
        (4, "bfloat16", "float32", True, 1024),
        (4, "bfloat16", "float32", False, 8192),
        (4, "bfloat16", "bfloat16", True, 1024),
        (2, "bfloat16", "bfloat16", False, 8192),
        (4, "bfloat16", "bfloat16", True, 16384),
        (2, "float32", "float32", True, 1024),
    ],
)
def test_the_most_at_once_of_a_rank_is_planned(meshes, shape, ranks, dtype, gathered, checkpointing, tokens):
    config = changed(
        composed("conf=gsm8k_h200"),
        actor__dp_size=ranks,
        actor__dtype=dtype,
        actor__gather_dtype=gathered,
        actor__gradient_checkpointing=checkpointing,
        actor__mb_spec__max_tokens_per_mb=tokens,
    )
    shape = SHAPES[shape]
    found = counted(config.actor, shape, meshes(ranks))
    assert 0.7 * planned(config, shape) <= found <= 1.05 * planned(config, shape)
