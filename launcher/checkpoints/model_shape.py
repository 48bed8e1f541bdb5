"""The shape of a transformer from its config.json: its tensors, its parameters, and bytes of KV cache for each token.

Qwen2, Qwen3 and Llama differ in few terms: biases of q, k, v (Qwen2), norms of q and k for each head (Qwen3),
biases by request (Llama's `attention_bias`, `mlp_bias`). Names and shapes as in transformers'
`modeling_{qwen2,qwen3,llama}.py`; tests compare them with what transformers writes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""Whose logits are the head applied to the last hidden state and nothing more, which the trainer relies on."""
RESCALED = ("dynamic", "longrope")
"""Kinds of rotary positions that depend, beyond the trained length, on the longest sequence of a batch. A trainer pads
and a server doesn't, so their log-probs would differ without a word."""
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
    def of(cls, config: Mapping[str, Any]) -> Self:
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
            positions=trained_positions(config) or 32768,
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
        return _count(self._outer_tensors())

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        return _count(self._layer_tensors())

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """All trained parameters by name, with their shapes; a tied output matrix is no parameter of its own."""
        found, layer = self._outer_tensors(), self._layer_tensors()
        for number in range(self.layers):
            found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
        return found

    def may_hold(self, name: str) -> bool:
        """Is this a tensor that some exports hold beside the parameters: a tied output matrix, an old rotary table?"""
        return (name == HEAD and self.tied) or name.endswith("rotary_emb.inv_freq")

    def _outer_tensors(self) -> dict[str, tuple[int, ...]]:
        head = {} if self.tied else {HEAD: (self.vocab, self.hidden)}
        return {EMBEDDING: (self.vocab, self.hidden), "model.norm.weight": (self.hidden,)} | head

    def _layer_tensors(self) -> dict[str, tuple[int, ...]]:
        h, q, kv, i = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim, self.intermediate
        norms = {"input_layernorm": h, "post_attention_layernorm": h}
        if self.model_type == "qwen3":
            norms |= {"self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim}
        attention = {"q_proj": (q, h), "k_proj": (kv, h), "v_proj": (kv, h), "o_proj": (h, q)}
        mlp = {"gate_proj": (i, h), "up_proj": (i, h), "down_proj": (h, i)}
        biased = {"q_proj", "k_proj", "v_proj"} if self.model_type == "qwen2" or self.attention_bias else set()
        if self.attention_bias and self.model_type != "qwen2":
            biased |= {"o_proj"}
        if self.mlp_bias and self.model_type == "llama":
            biased |= mlp.keys()
        found: dict[str, tuple[int, ...]] = {f"{name}.weight": (width,) for name, width in norms.items()}
        for part, matrices in (("self_attn", attention), ("mlp", mlp)):
            for name, shape in matrices.items():
                found[f"{part}.{name}.weight"] = shape
                if name in biased:
                    found[f"{part}.{name}.bias"] = shape[:1]
        return found

    def kv_bytes_per_token(self, dtype: str) -> int:
        """One key and one value of every KV head in every layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES[dtype]

    def kv_bytes_on_each(self, dtype: str, tp_size: int) -> int:
        """Of one token on each of `tp_size` GPUs: heads are divided, but none is split."""
        return self.kv_bytes_per_token(dtype) // min(tp_size, self.kv_heads)

    def adapter_parameters(self, names: Collection[str], rank: int) -> int:
        """Of LoRA on the matrices of each layer whose names end so: `rank` rows and as many columns beside each."""
        shapes = [s for name, s in self._layer_tensors().items() if name.split(".")[-2] in names and len(s) == 2]
        return self.layers * rank * sum(map(sum, shapes))


def trained_positions(config: Mapping[str, Any]) -> int | None:
    """How long a sequence may be: as config.json says, or as it was trained where longer ones are RESCALED."""
    longest = config.get("max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if original and (rope.get("rope_type") or rope.get("type")) in RESCALED:
        return min(int(original), int(longest or original))
    return None if longest is None else int(longest)


def _count(tensors: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in tensors.values())


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
