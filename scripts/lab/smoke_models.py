"""What the smoke of a GPU runs with: a model of random weights, problems for it, and the settings of its runs."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

from launcher.base.errors import ResourceError
from launcher.checkpoints.model_shape import KNOWN_SHAPES
from launcher.config.compose import compose
from launcher.resources.gpus import Gpu
from launcher.resources.memory_estimate import GIB
from scripts.faults.started_run import PRESET

TINY = "tiny"
SAME = (
    "reward.fn=scripts.faults.broken_reward:of_token_ids",
    *("gate.canaries=0", "gate.recorded=0", "gate.max_reward_jump=null", "gate.max_share_jump=null"),
    *("reward_health.zero_breaker_steps=null", "reward_health.fall_threshold=null"),
    *("evaluator.freq_steps=null", "valid_dataset.max_items=8", "saver.freq_epochs=null", "recover.freq_steps=20"),
    "total_train_epochs=10000",
)
"""Random weights learn nothing: rewards are drawn, and what judges them is off."""
ON_A_GPU = (
    *("sglang.device=cuda", "actor.device=cuda", "actor.dtype=bfloat16"),
    *("sglang.gpu_fraction=0.5", "actor.gpu_fraction=0.5", "sglang.mem_fraction_static=0.2"),
    *("sglang.max_total_tokens=null", "sglang.context_length=2048", "gconfig.max_new_tokens=256"),
    *("actor.gradient_checkpointing=true", "rollout.setup_timeout=600", "health.silence_s=15", "health.proof_s=45"),
)
LARGE_ON_A_GPU = (
    *("gconfig.max_new_tokens=256", "stats_logger.wandb.mode=disabled", "evaluator.freq_epochs=null"),
    *("recover.keep_last=1", "train_dataset.name=null", "valid_dataset.name=null"),
    *("train_dataset.split=train", "valid_dataset.split=train"),
)
"""Random weights never end an answer: 256 tokens are about what GSM8K's take in the mean."""
KEYS = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "layers": "num_hidden_layers",
    "vocab": "vocab_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "tied": "tie_word_embeddings",
    "positions": "max_position_embeddings",
}
"""Of config.json, by the field of a shape."""
PROBLEMS = 2048
LARGE_CARD = 100 * GIB


def small_words(model: Path, *, no_gpu: str, overrides: Sequence[str] = ()) -> list[str]:
    """Settings of a run that fits any card."""
    own = ("experiment_name=gpu_smoke", "actor.mb_spec.max_tokens_per_mb=16384", f"actor.path={model}")
    return [PRESET, *SAME, *(() if no_gpu else ON_A_GPU), *own, *overrides]


def large_words(model: Path, problems: Path, gpus: Sequence[Gpu], overrides: Sequence[str] = ()) -> list[str]:
    """Settings of the preset for this card, on made problems; without a card those of the preset for a CPU."""
    words = [*SAME, "experiment_name=large", f"actor.path={model}"]
    if not gpus:
        return [PRESET, *words, *overrides]
    preset = "conf=gsm8k_h200" if gpus[0].memory > LARGE_CARD else "conf=gsm8k_one_80gb"
    made = [f"{split}_dataset.path={problems}" for split in ("train", "valid")]
    return [preset, *words, *LARGE_ON_A_GPU, *made, *overrides]


def make_problems(file: Path) -> None:
    """Sums of so many characters as GSM8K's problems have tokens: lognormal, 90 in the median (the preset's tokenizer
    has a token for each character)."""
    source = random.Random(0)
    with file.open("w") as out:
        for _ in range(PROBLEMS):
            length = min(400, max(12, round(source.lognormvariate(math.log(90), 0.38))))
            numbers = [source.randrange(1, 99) for _ in range(max(2, length * 10 // 29))]
            record = {"question": "+".join(map(str, numbers)) + "=?", "answer": f"#### {sum(numbers)}"}
            out.write(json.dumps(record) + "\n")


def make_model(folder: Path, name: str, *, on_the_gpu: bool = False) -> None:
    """A folder with random weights and the preset's tokenizer, which has a word for each further id that the shape has.
    One that is whole already stays. `on_the_gpu`: drawn there in bfloat16, which is faster, and the GPU is held until
    this process ends. Raises ResourceError where there is no room for it."""
    vocabulary = folder / "tokenizer.json"  # written last
    if vocabulary.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    own, changes = Path(compose([PRESET]).actor.path), {}
    if name != TINY:
        shape = KNOWN_SHAPES[name]
        room, needed = shutil.disk_usage(folder.parent).free, 4 * shape.parameters
        if room < needed:
            said = f"{folder} needs {needed / GIB:.1f} GiB, {room / GIB:.1f} GiB are free"
            raise ResourceError(said, "make room, or name another --output")
        changes = {key: getattr(shape, field) for field, key in KEYS.items()}
    _save_random_weights(own, folder, changes, on_the_gpu=on_the_gpu)
    for file in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy2(own / file, folder)
    tokenizer = json.loads((own / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words |= {added["content"]: added["id"] for added in tokenizer["added_tokens"]}  # or they get ids after all others
    words |= {f"<{number}>": number for number in range(len(words), changes.get("vocab_size", 0))}
    vocabulary.write_text(json.dumps(tokenizer))


def _save_random_weights(like: Path, folder: Path, changes: dict[str, object], *, on_the_gpu: bool) -> None:
    """In the shape of the model `like`, but for the keys of its config.json that are given."""
    import torch  # here, since the command's help and its refusals need none
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(like, trust_remote_code=False)
    config.update(changes)
    config.update({"layer_types": ["full_attention"] * config.num_hidden_layers})
    config.update({"dtype": torch.bfloat16} if on_the_gpu else {})
    with torch.device("cuda" if on_the_gpu and torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
