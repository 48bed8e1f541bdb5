"""Whole Hugging Face folders of a few thousand random parameters, models of them, and rollouts to train them on."""

import json
import random
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from actors.model.policy_model import PolicyModel
from launcher.base.rollouts import Completion, Prompt, Rollout, RolloutGroup
from launcher.checkpoints.manifest import FACTS_FILE, TENSORS_FILE
from launcher.config.schema import ActorConfig, OptimizerConfig, RefConfig

UNTIED = ("llama", "mistral", "phi3", "olmo2", "glm4", "granite")
"""As the published models of these families are."""
FEATURES = {
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {
        "logits_scaling": 4.0,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
    },
}
"""What a family has and a model of two layers would not, or would have as 1."""
CHARACTERS = "0123456789+-=#\n"
VOCABULARY = 32


def make_model(folder: Path, kind: str = "qwen2", *, seed: int = 0, **settings: object) -> Path:
    """A model folder with weights large enough that its distributions are far from uniform."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        kind,
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "tie_word_embeddings": kind not in UNTIED,
            "initializer_range": 0.3,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": None,
            **FEATURES.get(kind, {}),
            **settings,
        },
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def make_tokenizer(folder: Path) -> None:
    """One token for each character, so that text and tokens map one to one."""
    vocabulary = {"<eos>": 0, "<unk>": 1} | {character: i + 2 for i, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    wrapped.chat_template = "{{ messages[0]['content'] }}"
    wrapped.save_pretrained(folder)


def actor(folder: Path, **settings: object) -> ActorConfig:
    """float32 on the CPU, with a learning rate that shows after one step."""
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps=2, lr_scheduler_type="cosine", weight_decay=0.1)
    return ActorConfig(**{"path": str(folder), "dtype": "float32", "device": "cpu", "optimizer": optimizer, **settings})


def reference(folder: Path, dtype: str = "float32") -> RefConfig:
    return RefConfig(path=str(folder), dtype=dtype)


def policy(folder: Path, ref: Path | None = None, *, temperature: float = 1.0, **settings: object) -> PolicyModel:
    """On one rank, with `ref` as its reference."""
    config = actor(folder, **settings)
    return PolicyModel(config, reference(ref or folder, config.dtype), temperature=temperature, total_steps=10)


def train(model: PolicyModel, seeds: Iterable[int] = range(3)) -> PolicyModel:
    """A step for each seed."""
    for seed in seeds:
        model.compute_gradients(make_groups(seed=seed))
        model.step_ahead()
        model.commit()
    return model


def weights(model: PolicyModel) -> dict[str, torch.Tensor]:
    """As they are now."""
    return {name: weight.clone() for name, weight in model.named_weights(torch.float32)}


def state_of(model: PolicyModel) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The content of the two files of its state as it is now, the float32 weights among the tensors."""
    with tempfile.TemporaryDirectory() as folder:
        model.write_state(Path(folder), model.training_state())
        return json.loads((Path(folder) / FACTS_FILE).read_bytes()), load_file(Path(folder) / TENSORS_FILE)


def make_groups(*, seed: int = 0, groups: int = 3, samples: int = 4, rewards=None, truncated=()) -> list[RolloutGroup]:
    """Rollouts of many lengths, with log-probs like a server's that lags behind; the second group has equal rewards.

    `truncated`: the completions that were cut, counted over all groups.
    """
    source = random.Random(seed)

    def rollout(group: int, sample: int) -> Rollout:
        tokens = tuple(source.randrange(VOCABULARY) for _ in range(source.randint(1, 9)))
        logprobs = tuple(-3.5 + source.random() for _ in tokens)
        reward = 0.5 if group == 1 else float((group + sample) % 3 == 0)
        ended = "length" if group * samples + sample in truncated else "stop"
        completion = Completion(
            token_ids=tokens, logprobs=logprobs, weight_version=0, finish_reason=ended, server="server-0"
        )
        return Rollout(completion=completion, text="", reward=reward if rewards is None else rewards[group][sample])

    return [
        RolloutGroup(
            prompt=Prompt(
                id=f"p{group}",
                token_ids=tuple(source.randrange(VOCABULARY) for _ in range(source.randint(1, 6))),
                record={},
            ),
            rollouts=tuple(rollout(group, sample) for sample in range(samples)),
        )
        for group in range(groups)
    ]
