"""The tensors of a model, by name with their shapes, as its config.json says.

Names and shapes as transformers' `modeling_{qwen2,qwen3,llama}.py` has them;
tests/unit/launcher/checkpoints/test_verification.py compares them with what transformers writes.
"""

from __future__ import annotations

from collections.abc import Iterator

from launcher.checkpoints.model_files import tensor_names
from launcher.checkpoints.model_shape import ModelShape

HEAD = "lm_head.weight"


def expected_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Of the trained parameters; a tied head is no parameter of its own."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrices = {
        "embed_tokens": (shape.vocab, shape.hidden),
        "lm_head": (shape.vocab, shape.hidden),
        "q_proj": (q, shape.hidden),
        "k_proj": (kv, shape.hidden),
        "v_proj": (kv, shape.hidden),
        "o_proj": (shape.hidden, q),
        "gate_proj": (shape.intermediate, shape.hidden),
        "up_proj": (shape.intermediate, shape.hidden),
        "down_proj": (shape.hidden, shape.intermediate),
    }
    found = {name: matrices.get(name.split(".")[-2], (shape.hidden,)) for name in tensor_names(shape)}
    return found | dict(_small_ones(shape, q, kv))


def _small_ones(shape: ModelShape, q: int, kv: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Biases and the norms of each head, which only some of the architectures have."""
    widths: dict[str, int] = {}
    if shape.model_type == "qwen2" or shape.attention_bias:
        widths |= {"self_attn.q_proj.bias": q, "self_attn.k_proj.bias": kv, "self_attn.v_proj.bias": kv}
    if shape.attention_bias and shape.model_type != "qwen2":
        widths["self_attn.o_proj.bias"] = shape.hidden
    if shape.model_type == "qwen3":
        widths |= {"self_attn.q_norm.weight": shape.head_dim, "self_attn.k_norm.weight": shape.head_dim}
    if shape.mlp_bias and shape.model_type == "llama":
        widths |= {"mlp.gate_proj.bias": shape.intermediate, "mlp.up_proj.bias": shape.intermediate}
        widths["mlp.down_proj.bias"] = shape.hidden
    for layer in range(shape.layers):
        for name, width in widths.items():
            yield f"model.layers.{layer}.{name}", (width,)


def may_be_there(name: str, shape: ModelShape) -> bool:
    """Beside the expected ones: a tied head written out, tables that older exports keep."""
    return (name == HEAD and shape.tied) or name.endswith("rotary_emb.inv_freq")
