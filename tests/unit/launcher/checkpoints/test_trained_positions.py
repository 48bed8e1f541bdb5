"""How long a sequence may be where rotary positions are rescaled by a batch's length, or the server has no window."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from launcher.checkpoints.model_shape import ModelShape, trained_positions


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"max_position_embeddings": 128}, 128),
        ({}, None),
        ({"max_position_embeddings": 128, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 128),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096},
            },
            4096,
        ),
        (
            {
                "max_position_embeddings": 128,
                "original_max_position_embeddings": 64,
                "rope_scaling": {"type": "dynamic"},
            },
            64,
        ),
        ({"max_position_embeddings": 128, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 128),
        ({"model_type": "mistral", "max_position_embeddings": 32768}, 4096),
        ({"model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": None}, 32768),
        ({"model_type": "phi3", "max_position_embeddings": 4096, "sliding_window": 2047}, 2047),
        ({"model_type": "qwen2", "max_position_embeddings": 32768, "sliding_window": 4096}, 32768),
        (
            {
                "model_type": "qwen2",
                "max_position_embeddings": 32768,
                "sliding_window": 4096,
                "use_sliding_window": True,
            },
            4096,
        ),
        ({"model_type": "gemma3_text", "max_position_embeddings": 32768, "sliding_window": 512}, 32768),
    ],
)
def test_no_sequence_is_longer_than_those_it_was_trained_on(config, longest):
    assert trained_positions(config) == longest


def test_beyond_them_padding_changes_what_a_dynamic_model_says():
    """The failure that the limit prevents, and that within it there is none."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.3,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.randint(0, 32, (1, 30))

    def padded_to(width):
        padding = torch.zeros(1, width - 30, dtype=torch.int64)
        return model(torch.cat([tokens, padding], dim=1)).logits[:, :30]

    alone, limit = model(tokens).logits, ModelShape.of(config.to_dict()).positions
    assert limit == 32
    torch.testing.assert_close(padded_to(limit), alone, rtol=1e-4, atol=1e-4)
    assert (padded_to(48) - alone).abs().max() > 1e-3
