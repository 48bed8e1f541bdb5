"""A small Qwen2 without torch: a stand-in server that holds real weights is there in half a second, not in five.

In double precision, so that what differs from the trainer's log-probs is the trainer's rounding.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


class TruthfulModel:
    """The model in `folder`, its word embeddings tied; `logprobs` are what an SGLang with these weights reports."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        assert config["model_type"] == "qwen2"
        assert config["tie_word_embeddings"]
        weights = load_file(folder / "model.safetensors")
        self._weights = {name.removeprefix("model."): array.astype(np.float64) for name, array in weights.items()}
        self._layers: int = config["num_hidden_layers"]
        self._heads = config["num_attention_heads"]
        self._kv_heads = config["num_key_value_heads"]
        self._width: int = config["hidden_size"] // self._heads
        self._epsilon: float = config["rms_norm_eps"]
        self._theta: float = config["rope_parameters"]["rope_theta"]

    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Of `tokens` after `prompt`, at temperature 1."""
        hidden = self._weights["embed_tokens.weight"][[*prompt, *tokens]]
        for layer in range(self._layers):
            at = f"layers.{layer}."
            hidden = hidden + self._attention(self._norm(hidden, at + "input_layernorm"), at + "self_attn.")
            hidden = hidden + self._mlp(self._norm(hidden, at + "post_attention_layernorm"), at + "mlp.")
        predicting = self._norm(hidden[len(prompt) - 1 : -1], "norm")
        logits = predicting @ self._weights["embed_tokens.weight"].T
        logits -= logits.max(-1, keepdims=True)
        chosen = logits[np.arange(len(tokens)), list(tokens)]
        found: list[float] = (chosen - np.log(np.exp(logits).sum(-1))).tolist()
        return found

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self._epsilon)
        return x / scale * self._weights[name + ".weight"]

    def _mlp(self, x: np.ndarray, at: str) -> np.ndarray:
        gate = x @ self._weights[at + "gate_proj.weight"].T
        up = x @ self._weights[at + "up_proj.weight"].T
        return (gate / (1 + np.exp(-gate)) * up) @ self._weights[at + "down_proj.weight"].T

    def _attention(self, x: np.ndarray, at: str) -> np.ndarray:
        """Causal, with rotated queries and keys; several query heads share a key head."""
        length = len(x)

        def heads(name: str, n: int) -> np.ndarray:
            made = x @ self._weights[f"{at}{name}.weight"].T + self._weights[f"{at}{name}.bias"]
            return made.reshape(length, n, self._width).transpose(1, 0, 2)  # [head, position, width]

        shared = self._heads // self._kv_heads
        queries = self._rotated(heads("q_proj", self._heads))
        keys = self._rotated(heads("k_proj", self._kv_heads)).repeat(shared, 0)
        values = heads("v_proj", self._kv_heads).repeat(shared, 0)
        scores = queries @ keys.transpose(0, 2, 1) / np.sqrt(self._width)
        scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = shares / shares.sum(-1, keepdims=True) @ values
        return mixed.transpose(1, 0, 2).reshape(length, -1) @ self._weights[at + "o_proj.weight"].T

    def _rotated(self, x: np.ndarray) -> np.ndarray:
        half = self._width // 2
        angles = np.arange(x.shape[1])[:, None] * self._theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angles), np.sin(angles)
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
