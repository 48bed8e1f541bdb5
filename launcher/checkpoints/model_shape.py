"""The shape of a transformer from its config.json: its tensors, its parameters, and bytes of KV cache for each token.

`FAMILIES` says in what the models that can be trained differ. Names and shapes as in transformers' modeling files;
tests compare them with what transformers writes. docs/recipes.md has what was tried.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
QKV, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")
QKVO = (*QKV, "o_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """In what a kind of model differs from Mistral, the plainest."""

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    qk_norm: str = ""
    """"head": q and k of each head are normalised; "all": those of all heads together."""
    fused: tuple[str, ...] = ()
    """Of qkv_proj and gate_up_proj: one matrix in place of three and two."""
    biased: tuple[str, ...] = ()
    attention_bias: tuple[str, ...] = ()
    """Biased where config.json says so; `mlp_bias` likewise."""
    mlp_bias: tuple[str, ...] = ()
    left_out: Mapping[str, Any] = field(default_factory=dict)
    """transformers' defaults, where they are not false, of what a config.json may leave out."""
    server_slides: bool = False
    """SGLang's own code of it knows sliding windows. That of the others attends to everything."""


FAMILIES: Mapping[str, Family] = {
    "gemma3_text": Family(
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        qk_norm="head",
        attention_bias=QKVO,
        left_out={"head_dim": 256, "tie_word_embeddings": True},
        server_slides=True,
    ),
    "glm4": Family(
        norms=("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
        fused=("gate_up_proj",),
        attention_bias=QKV,
        left_out={"head_dim": 128, "attention_bias": True},
    ),
    "granite": Family(attention_bias=QKVO, mlp_bias=MLP),
    "llama": Family(attention_bias=QKVO, mlp_bias=MLP),
    "mistral": Family(left_out={"sliding_window": 4096}),
    "olmo2": Family(
        norms=("post_attention_layernorm", "post_feedforward_layernorm"), qk_norm="all", attention_bias=QKVO
    ),
    "phi3": Family(fused=("qkv_proj", "gate_up_proj")),
    "qwen2": Family(biased=QKV, left_out={"use_sliding_window": False}),
    "qwen3": Family(qk_norm="head", attention_bias=QKVO, left_out={"head_dim": 128, "use_sliding_window": False}),
}
MODEL_TYPES = tuple(FAMILIES)
"""Whose logits are the head applied to the last hidden state, over Granite's `logits_scaling`, and nothing more, which
the trainer relies on."""
RESCALED = ("dynamic", "longrope", "su")
"""Kinds of rotary positions that depend, beyond the trained length, on the longest sequence of a batch. A trainer pads
and a server doesn't, so their log-probs would differ without a word."""

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
        config = {**FAMILIES[model_type].left_out, **config}
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return cls(
            model_type=model_type,
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
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
        family = FAMILIES[self.model_type]
        h, q, kv, i = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim, self.intermediate
        found: dict[str, tuple[int, ...]] = {f"{name}.weight": (h,) for name in family.norms}
        if family.qk_norm:
            widths = (self.head_dim, self.head_dim) if family.qk_norm == "head" else (q, kv)
            found |= {f"self_attn.{name}_norm.weight": (width,) for name, width in zip("qk", widths, strict=True)}
        attention = {"q_proj": (q, h), "k_proj": (kv, h), "v_proj": (kv, h), "o_proj": (h, q)}
        if "qkv_proj" in family.fused:
            attention = {"qkv_proj": (q + 2 * kv, h), "o_proj": (h, q)}
        mlp = {"gate_proj": (i, h), "up_proj": (i, h), "down_proj": (h, i)}
        if "gate_up_proj" in family.fused:
            mlp = {"gate_up_proj": (2 * i, h), "down_proj": (h, i)}
        biased = {*family.biased, *(family.attention_bias if self.attention_bias else ())}
        biased |= {*(family.mlp_bias if self.mlp_bias else ())}
        for part, matrices in (("self_attn", attention), ("mlp", mlp)):
            for name, shape in matrices.items():
                found[f"{part}.{name}.weight"] = shape
                if name in biased:
                    found[f"{part}.{name}.bias"] = shape[:1]
        return found

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Of a layer, by the ends of their names: those that can have an adapter."""
        return {name.split(".")[-2]: shape for name, shape in self._layer_tensors().items() if len(shape) == 2}

    def kv_bytes_per_token(self, dtype: str) -> int:
        """One key and one value of every KV head in every layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES[dtype]

    def kv_bytes_on_each(self, dtype: str, tp_size: int) -> int:
        """Of one token on each of `tp_size` GPUs: heads are divided, but none is split."""
        return self.kv_bytes_per_token(dtype) // min(tp_size, self.kv_heads)

    def adapter_parameters(self, names: Collection[str], rank: int) -> int:
        """Of LoRA on the matrices of each layer whose names end so: `rank` rows and as many columns beside each."""
        return self.layers * rank * sum(sum(shape) for name, shape in self.matrices.items() if name in names)


def trained_positions(config: Mapping[str, Any]) -> int | None:
    """How long a sequence may be: as config.json says, as it was trained where longer ones are RESCALED, and as wide as
    the sliding window where the server knows none."""
    family = FAMILIES.get(config.get("model_type") or "", Family(server_slides=True))
    config = {**family.left_out, **config}
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    limits = [config.get("max_position_embeddings")]
    if (rope.get("rope_type") or rope.get("type")) in RESCALED:
        limits += [rope.get("original_max_position_embeddings"), config.get("original_max_position_embeddings")]
    if not family.server_slides and config.get("use_sliding_window", True):
        limits.append(config.get("sliding_window"))
    return min((int(limit) for limit in limits if limit), default=None)


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
