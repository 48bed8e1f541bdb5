"""The sizes of a transformer from its config.json: parameters, and bytes of KV cache for each token.

Qwen2, Qwen3 and Llama differ in few terms: biases of q, k, v (Qwen2), norms of q and k for each head (Qwen3),
biases by request (Llama's `attention_bias`, `mlp_bias`). Read from transformers' `modeling_{qwen2,qwen3,llama}.py`;
the counts agree with what the models' own files hold (tests/unit/test_model_shape.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MODEL_TYPES = ("llama", "qwen2", "qwen3")
QWEN3_HEAD_DIM = 128
"""transformers' default where a Qwen3 config names none; the others divide `hidden` by `heads`."""

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What config.json says; `head_dim` is the width of one attention head, `positions` the longest sequence."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    positions: int
    tied: bool
    attention_bias: bool = False
    mlp_bias: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """Raises KeyError, TypeError or ValueError naming what config.json lacks."""
        model_type = str(config["model_type"])
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return cls(
            model_type=model_type,
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or (QWEN3_HEAD_DIM if model_type == "qwen3" else hidden // heads)),
            intermediate=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            positions=int(config.get("max_position_embeddings", 32768)),
            tied=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
        )

    @property
    def parameters(self) -> int:
        return self.outside_layers + self.layers * self.layer

    @property
    def outside_layers(self) -> int:
        """Parameters of the embeddings, the output and the last norm."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        h, q, kv, i = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim, self.intermediate
        attention = h * q + 2 * h * kv + q * h
        if self.model_type == "qwen2":
            attention += q + 2 * kv
        elif self.attention_bias:
            attention += q + 2 * kv + h
        if self.model_type == "qwen3":
            attention += 2 * self.head_dim
        mlp = 3 * h * i + (2 * i + h if self.mlp_bias and self.model_type == "llama" else 0)
        return attention + mlp + 2 * h

    def kv_bytes_per_token(self, dtype: str) -> int:
        """One key and one value of every KV head in every layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES[dtype]

    def kv_bytes_on_each(self, dtype: str, tp_size: int) -> int:
        """Of one token on each of `tp_size` GPUs: heads are divided, but none is split."""
        return self.kv_bytes_per_token(dtype) // min(tp_size, self.kv_heads)

    def checkpoint_bytes(self, dtype: str) -> int:
        """Weights to serve (in `dtype`) + float32 masters (4) + AdamW's two moments (8), for each parameter."""
        return self.parameters * (BYTES[dtype] + 4 + 8)


def _qwen25(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int, tied: bool
) -> ModelShape:
    return ModelShape(
        model_type="qwen2",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate=intermediate,
        vocab=vocab,
        positions=32768,
        tied=tied,
    )


KNOWN_SHAPES: Mapping[str, ModelShape] = {
    "Qwen/Qwen2.5-0.5B": _qwen25(896, 24, 14, 2, 4864, 151936, True),
    "Qwen/Qwen2.5-1.5B": _qwen25(1536, 28, 12, 2, 8960, 151936, True),
    "Qwen/Qwen2.5-3B": _qwen25(2048, 36, 16, 2, 11008, 151936, True),
    "Qwen/Qwen2.5-7B": _qwen25(3584, 28, 28, 4, 18944, 152064, False),
}
"""From the config.json that each was published with, so that a plan can be made before the model is there."""


def known_shape(name: str) -> ModelShape | None:
    """The shape of a published model by its hub name; an `-Instruct` has its base's."""
    return KNOWN_SHAPES.get(name.removesuffix("-Instruct"))
